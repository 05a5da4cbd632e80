#!/usr/bin/env bash
# Builds targets from nothing in two folders, neither of them a git checkout, and fails if a library or program of one has
# other bytes than that of the other. Without arguments, the targets are everything without libtorch, and a few with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($#)); then
  targets=("$@")
else
  tools/setup.sh
  torch_free="$(bazel cquery --noshow_progress --ui_event_filters=-info \
    'kind("cc_.* rule", //... except rdeps(//..., //third_party:libtorch))' | cut -d' ' -f1 | sort -u)"
  mapfile -t targets <<<"${torch_free}"
  targets+=(//distributed:device_mesh //lora:dora //lora:lora_matmul //tests/distributed:device_test)
fi

folder="$(mktemp -d --tmpdir reproducible.XXXXXX)"
readonly folder
cleanup() {
  chmod -R u+w "${folder}"
  rm -rf "${folder}"
}
trap cleanup EXIT

# Builds in `$1`, a folder below the temporary one, and writes the hashes of what it made to `$2`.
build_and_hash() {
  local -r workspace="${folder}/$1/workspace" output_base="${folder}/$1/output"
  tools/copy_tree.sh "${workspace}"
  cd "${workspace}"
  tools/setup.sh
  bazel --output_base="${output_base}" build --noshow_progress --experimental_convenience_symlinks=ignore -- "${targets[@]}"
  local binaries
  binaries="$(bazel --output_base="${output_base}" info --noshow_progress bazel-bin)"
  cd "${binaries}"
  find . -name '*.runfiles' -prune -o -type f \( -name '*.[ao]' -o -name '*.so' -o -perm -u+x ! -name '*.*' \) -print0 |
    sort -z | xargs -0 sha256sum >"$2"
  cd "${workspace}"
  bazel --output_base="${output_base}" shutdown
  chmod -R u+w "${folder:?}/${1%%/*}"
  rm -rf "${folder:?}/${1%%/*}"
}
(build_and_hash first "${folder}/first.sha256")
(build_and_hash a/second/deeper "${folder}/second.sha256")

files="$(wc -l <"${folder}/first.sha256")"
if ((files == 0)) || ! diff "${folder}/first.sha256" "${folder}/second.sha256"; then
  echo "reproducible: the files above differ, of ${files}" >&2
  exit 1
fi
echo "reproducible: ${files} libraries and programs are the same in both folders"
