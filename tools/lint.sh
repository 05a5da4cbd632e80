#!/usr/bin/env bash
# Checks the format of C++ and Bazel files, that targets depend on what they include and on nothing else, that each component has
# its tests and its benchmark, that packages depend on each other in one direction only, that every public member has a comment,
# that headers compile alone and say which language and libtorch they need, that no action depends on where the tree is, and what
# clang-tidy says of libraries without libtorch (tools/tidy.sh checks the others). With --fix it formats the files before.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh

fix=false
[[ "${1:-}" == --fix ]] && fix=true

# Not by git, which an archive of the tree does not have.
files() { find . \( -name .git -o -name 'bazel-*' -o -name node_modules \) -prune -o -type f "$@" -print | sort; }
mapfile -t cc_files < <(files \( -name '*.h' -o -name '*.cc' \))
mapfile -t bazel_files < <(files \( -name WORKSPACE -o -name BUILD.bazel -o -name '*.BUILD' -o -name '*.bzl' \))

folder="$(mktemp -d --tmpdir lint.XXXXXX)"
trap 'rm -rf "${folder}"' EXIT
(
  cd "${folder}"
  npm pack --loglevel=error --prefer-offline @bazel/buildifier@8.2.1 >/dev/null
  sha256sum --check --quiet <<<'b96ea9b13003036c801f52bee6f9b0314738f8432e5cb9d814c89f59292604ee  bazel-buildifier-8.2.1.tgz'
  tar -xf bazel-buildifier-8.2.1.tgz package/buildifier-linux_amd64
)
buildifier() { "${folder}/package/buildifier-linux_amd64" "$@"; }

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

quiet_bazel() { bazel "$1" --noshow_progress --ui_event_filters=-info "${@:2}"; }

targets="$(quiet_bazel query --output=xml //...)"
python3 tools/check_deps.py <<<"${targets}"
python3 tools/check_components.py <<<"${targets}"

# config knows nothing of torch, distributed nothing of LoRA, no library of an example or a test, and a build for CPU nothing
# of CUDA. `bazel query` would fetch CUDA's libraries to answer.
forbid() {
  local found
  found="$(quiet_bazel cquery "$1")"
  if [[ -n "${found}" ]]; then
    echo "lint: $2: ${found//$'\n'/, }" >&2
    exit 1
  fi
}
forbid_deps() { forbid "deps($1) intersect ($2)" "$1 must not depend on"; }
forbid_libtorch() { forbid "filter('^@libtorch//:libtorch$', deps($1))" "$1 must not depend on"; }
forbid_deps '//config/...' '//distributed/... + //lora/... + //examples/... + //tests/...'
forbid_deps '//distributed/...' '//lora/... + //examples/... + //tests/...'
forbid_deps '//distributed:all' '//distributed/checkpoint/...'
forbid_deps '//lora/...' '//examples/... + //tests/...'
torch_free='//distributed:gradient_bucket + //distributed:placement + //distributed/checkpoint:safetensors_file'
torch_free+=' + //distributed/checkpoint:safetensors_checkpoint + //distributed/checkpoint:key_aliases'
torch_free+=' + //distributed/checkpoint:state_dict_mapping + //distributed/checkpoint:key_resolver'
torch_free+=' + //distributed/checkpoint:load_plan + //distributed:tensor_slice'
torch_free+=' + //lora:target_matcher + //lora:adapter_config'
forbid_libtorch '//config/...'
forbid_libtorch "${torch_free}"
forbid 'filter("^@libtorch_cuda//", deps(//...))' 'a build for CPU must not fetch'

quiet_bazel build //docs:api_reference || {
  echo "lint: what the lines above name needs a comment in its header" >&2
  exit 1
}

# Or else no other machine could run an action, or use its result. A target that is for CUDA alone has an action that fails.
output_base="$(quiet_bazel info output_base)"
actions="$(quiet_bazel aquery --include_artifacts=false //... | grep -v "^action 'Reporting failed target")"
if grep -F -m 3 -e "${PWD}" -e "${output_base}" <<<"${actions}" >&2; then
  echo "lint: actions name folders of this machine" >&2
  exit 1
fi

tools/tidy.sh --torch-free
python3 tools/check_headers.py

echo "lint: ${#cc_files[@]} C++ and ${#bazel_files[@]} Bazel files: formats, deps, components, directions, comments, actions," \
  "clang-tidy and headers are clean"
