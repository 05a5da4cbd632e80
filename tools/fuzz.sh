#!/usr/bin/env bash
# Runs each fuzz target for some seconds (20 unless given) from its corpus in tests/testdata/fuzz, with clang's libFuzzer and
# sanitizers; as many at a time as there are cores. Arguments after the seconds are the names of targets, for these alone. Fails
# with the path of an input that breaks a target: fix the cause, and add the input to the corpus. What it finds on the way stays
# in the folder for temporary files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly seconds="${1:-20}"
[[ "${seconds}" =~ ^[1-9][0-9]*$ ]] || { echo "fuzz: ${seconds} is no number of seconds" >&2; exit 1; }
targets=("${@:2}")
targets=("${targets[@]/#///tests/fuzz:}")

tools/setup.sh clang libclang-rt-14-dev
if ((${#targets[@]} == 0)); then
  found="$(bazel query --noshow_progress 'attr(tags, fuzz, //tests/fuzz/...)')"
  mapfile -t targets <<<"${found}"
fi
bazel build --config=fuzz "${targets[@]}"

folder="$(mktemp -d --tmpdir fuzz.XXXXXX)"
readonly folder
run() {
  local -r target="$1" name="${1##*:}"
  mkdir "${folder}/${name}"
  # The first folder takes what is new, the second is only read.
  bazel run --config=fuzz --noshow_progress "${target}" -- -max_total_time="${seconds}" -timeout=30 -print_final_stats=1 \
    -artifact_prefix="${folder}/${name}-" "${folder}/${name}" "${PWD}/tests/testdata/fuzz/${name}" \
    >"${folder}/${name}.log" 2>&1 && touch "${folder}/${name}.passed"
  # What came out of it, in one piece whatever else is running; the rest is in the folder.
  printf '=== %s: %s s\n%s\n' "${name}" "${seconds}" \
    "$(grep -aE 'DONE|does not hold|ERROR:|SUMMARY:' "${folder}/${name}.log")"
}

cores="$(nproc)"
for target in "${targets[@]}"; do
  (($(jobs -rp | wc -l) < cores)) || wait -n || true
  run "${target}" &
done
wait

failed=()
for target in "${targets[@]}"; do
  [[ -e "${folder}/${target##*:}.passed" ]] || failed+=("${target}")
done
if ((${#failed[@]})); then
  echo "fuzz: failed: ${failed[*]}: findings, beside the output of each target:" >&2
  find "${folder}" -maxdepth 1 -type f ! -name '*.passed' >&2
  exit 1
fi
echo "fuzz: nothing found"
