# The input filter of Doxygen: makes its comments of the plain ones in a header, line for line, so that its warnings have the
# header's lines.
#
# - The comment before the include guard is that of the file; without one there is a reference to it, which is an error.
# - What is indented by three spaces or more is code, a formula or a table, unless it goes on with an item of a list.
# - Deleted functions, destructors, moves and instantiations that have no comment are left out: they say nothing.
# - Headings of sections, --- Such ---, are left out too.
# - TORCH_MODULE(Name) is the class that it declares.
# - What is for clang-tidy, // NOLINT and so on, is left out.

# `text` with nothing that is a command or a tag to Doxygen; what is in backticks is neither.
function escape(text,    parts, count, i, result) {
  count = split(text, parts, "`")
  for (i = 1; i <= count; ++i) {
    if (i % 2) gsub(/[\\@<>#%]/, "\\\\&", parts[i])
    result = result (i > 1 ? "`" : "") parts[i]
  }
  return result
}

# A comment's line from its indentation and text. Where code begins and ends is marked on the line before, which is still held.
function comment(indentation, text,    is_code) {
  if (text ~ /^ (-|[0-9]+\.) /) in_item = 1
  else if (text !~ /^   /) in_item = 0
  is_code = text ~ /^   / && !in_item
  if (is_code && !in_code) begin_code(text)
  if (!is_code && in_code && text != "") end_code()
  in_code = is_code || (in_code && text == "")
  return indentation "///" (in_code ? text : escape(text))
}

function begin_code(text) {
  kind = text ~ /[;({=]$|\(.*,$|^ *(class|\/\/) / ? "{.cpp}" : "{.unparsed}"
  held = held " @code" kind
}

function end_code() {
  if (in_code) held = held " @endcode"
  in_code = 0
}

# Whether it declares the move constructor or the move assignment of a class.
function is_move(line,    names) {
  if (line ~ /operator=\([A-Za-z0-9]+&&/) return 1
  if (!match(line, /[A-Za-z0-9]+\([A-Za-z0-9]+&&/)) return 0
  split(substr(line, RSTART, RLENGTH), names, /[(&]/)
  return names[1] == names[2]
}

function declaration(line) {
  if (!guard && line ~ /^#ifndef .*_H_$/) {
    guard = substr(line, 9)
    return was_comment ? "/// @file" : "/// @ref a_comment_on_this_file @file"
  }
  if (guard && line ~ "^#(define|endif  //) " guard "$") return ""
  if (!was_comment && (line ~ /= delete;$|^extern template |^ *~[A-Za-z]+\(\)/ || is_move(line))) return ""
  if (match(line, /^TORCH_MODULE\([A-Za-z0-9]+\);$/)) {
    name = substr(line, 14, length(line) - 15)
    return "/** A shared handle to a " name "Impl, as the classes of torch::nn are. */ class " name \
           " : public torch::nn::ModuleHolder<" name "Impl> {};"
  }
  if (match(line, /[;,] +\/\/ /)) {
    return substr(line, 1, RSTART) "  ///< " escape(substr(line, RSTART + RLENGTH))
  }
  return line
}

{
  sub(/ *\/\/ NOLINT.*/, "")
  is_comment = match($0, /^ *\/\/( |$)/)
  if (is_comment && $0 ~ / ---$/) {
    line = ""
  } else if (is_comment) {
    indentation = substr($0, 1, match($0, /\//) - 1)
    line = comment(indentation, substr($0, length(indentation) + 3))
  } else {
    end_code()
    line = declaration($0)
  }
  if (NR > 1) print held
  held = line
  was_comment = is_comment
}

END { print held }
