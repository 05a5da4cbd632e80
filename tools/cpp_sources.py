"""The C++ files of the workspace, what they include, and how Bazel compiles them. Paths are those from the root."""

import json
import pathlib
import re

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^ *# *include +["<]([^">]+)[">]', re.MULTILINE)


def includes(text: str) -> list[str]:
    return _INCLUDE.findall(text)


def read_files() -> dict[str, str]:
    """The text of each C++ file that is not of a workspace of its own, by its path."""
    others = pathlib.Path(".bazelignore").read_text().split()
    return {
        str(path): path.read_text()
        for path in sorted(pathlib.Path().rglob("*"))
        if path.suffix in (".cc", ".h")
        and not path.parts[0].startswith("bazel-")
        and not any(path.is_relative_to(other) for other in others)
    }


def read_compile_commands(files: dict[str, str]) -> dict[str, list[str]]:
    """The arguments that compile each source, of those that tools/compile_commands.sh has found."""
    entries = json.loads(pathlib.Path("compile_commands.json").read_text())
    return {entry["file"]: entry["arguments"] for entry in entries if entry["file"] in files}


def first_include(text: str) -> str | None:
    """What a file includes before all else, if that is the first thing in it."""
    match = _INCLUDE.match(_COMMENT.sub("", text).lstrip())
    return match.group(1) if match else None


def included(file: str, files: dict[str, str]) -> set[str]:
    """Our headers that a file includes, itself or through others."""
    found: set[str] = set()
    left = [file]
    while left:
        headers = {header for header in includes(files[left.pop()]) if header in files} - found
        found |= headers
        left += headers
    return found
