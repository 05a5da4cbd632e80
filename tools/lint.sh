#!/usr/bin/env bash
# Checks the format of C++ and Bazel files, and that packages depend on each other in one direction only. With --fix it
# formats the files instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fix=false
[[ "${1:-}" == --fix ]] && fix=true

mapfile -t cc_files < <(git ls-files '*.h' '*.cc')
mapfile -t bazel_files < <(git ls-files 'WORKSPACE' '*BUILD.bazel' '*.bzl' '*/WORKSPACE')
buildifier() { npm exec --yes --package=@bazel/buildifier@8.2.1 -- buildifier "$@"; }

if "${fix}"; then
  clang-format -i "${cc_files[@]}"
  buildifier "${bazel_files[@]}"
else
  clang-format --dry-run --Werror "${cc_files[@]}"
  buildifier -mode=check "${bazel_files[@]}" || {
    echo "lint: the files above are not formatted: run tools/lint.sh --fix" >&2
    exit 1
  }
fi

# config knows nothing of torch, distributed nothing of LoRA, no library of an example or a test, and a build for CPU nothing
# of CUDA. `bazel query` would fetch CUDA's libraries to answer.
bazel cquery --noshow_progress //... >/dev/null 2>&1 || { echo "lint: bazel cquery fails" >&2; exit 1; }
forbid() {
  local found
  found="$(bazel cquery --noshow_progress "$1" 2>/dev/null)"
  if [[ -n "${found}" ]]; then
    echo "lint: $2: ${found//$'\n'/, }" >&2
    exit 1
  fi
}
forbid_deps() { forbid "deps($1) intersect ($2)" "$1 must not depend on"; }
forbid_libtorch() { forbid "filter('^@libtorch//:libtorch$', deps($1))" "$1 must not depend on"; }
forbid_deps '//config/...' '//distributed/... + //lora/... + //examples/... + //tests/...'
forbid_deps '//distributed/...' '//lora/... + //examples/... + //tests/...'
forbid_deps '//lora/...' '//examples/... + //tests/...'
torch_free='//distributed:gradient_bucket + //distributed:placement + //distributed/checkpoint:safetensors_file'
torch_free+=' + //distributed/checkpoint:safetensors_checkpoint + //distributed/checkpoint:key_aliases'
torch_free+=' + //distributed/checkpoint:state_dict_mapping + //distributed/checkpoint:key_resolver'
torch_free+=' + //distributed/checkpoint:load_plan + //distributed:tensor_slice'
torch_free+=' + //lora:target_matcher'
forbid_libtorch '//config/...'
forbid_libtorch "${torch_free}"
forbid 'filter("^@libtorch_cuda//", deps(//...))' 'a build for CPU must not fetch'
echo "lint: clean"
