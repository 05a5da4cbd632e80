#!/usr/bin/env bash
# Writes compile_commands.json, from which clangd and clang-tidy know the options of each source: what Bazel would run for CPU.
# Builds generated sources; needs no network once Bazel has fetched the repositories, as any build does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh

folder="$(mktemp -d)"
readonly folder
trap 'rm -rf "${folder}"' EXIT

# Runs Bazel, and says what it said if it fails.
run_bazel() {
  bazel "$1" --noshow_progress "${@:2}" 2>"${folder}/log" || { cat "${folder}/log" >&2; exit 1; }
}

run_bazel query 'kind("genrule rule", //...) except attr(tags, manual, //...)' >"${folder}/generated"
mapfile -t generated <"${folder}/generated"
run_bazel build "${generated[@]}"
run_bazel aquery --include_artifacts=false --output=jsonproto 'mnemonic("CppCompile", //...)' >"${folder}/actions"
run_bazel info output_base >"${folder}/output_base"
run_bazel info output_path >"${folder}/output_path"
python3 tools/compile_commands.py "${PWD}" "$(<"${folder}/output_base")" "$(<"${folder}/output_path")" \
  <"${folder}/actions" >"${folder}/new"
mv "${folder}/new" compile_commands.json
