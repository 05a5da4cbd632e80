#!/usr/bin/env bash
# Prints how many seconds a target takes to build again when a public header has changed, for the headers of the arguments or all:
#
#   tools/rebuild_times.sh //:lora_training lora/linear.h distributed/device_mesh.h
#
# This folder stays as it is: a copy of it is built, and changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly target="${1:?"give a target, such as //:lora_training"}"
shift
headers=("$@")
((${#headers[@]})) || mapfile -t headers < <(find config distributed lora -name '*.h' ! -path '*/internal/*' | sort)

folder="$(mktemp -d --tmpdir rebuild_times.XXXXXX)"
readonly folder
in_copy() { bazel --output_base="${folder}/output" "$@"; }
cleanup() {
  in_copy shutdown
  chmod -R u+w "${folder}"
  rm -rf "${folder}"
}
tools/copy_tree.sh "${folder}/workspace"
[[ ! -e user.bazelrc ]] || cp user.bazelrc "${folder}/workspace"
cd "${folder}/workspace"
trap cleanup EXIT
tools/setup.sh

build() { in_copy build --noshow_progress --ui_event_filters=-info "$@" -- "${target}"; }
build

for header in "${headers[@]}"; do
  echo "// Changed." >>"${header}"
  started="${EPOCHREALTIME/./}"
  build --disk_cache= # Nothing from a run before, nothing for the next.
  printf '%6.1f  %s\n' "$(((${EPOCHREALTIME/./} - started) / 100000))e-1" "${header}"
done
