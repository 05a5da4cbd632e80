#!/usr/bin/env bash
# Runs each fuzz target for some seconds (20 unless given) from its corpus in tests/testdata/fuzz, with clang's libFuzzer and
# sanitizers. Fails with the path of an input that breaks a target: fix the cause, and add the input to the corpus. What it
# finds on the way stays in the folder for temporary files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly seconds="${1:-20}"
[[ "${seconds}" =~ ^[1-9][0-9]*$ ]] || { echo "fuzz: ${seconds} is no number of seconds" >&2; exit 1; }

tools/setup.sh clang libclang-rt-14-dev
mapfile -t targets < <(bazel query --noshow_progress 'attr(tags, fuzz, //tests/fuzz/...)' 2>/dev/null)
((${#targets[@]})) || { echo "fuzz: no target was found" >&2; exit 1; }
bazel build --config=fuzz "${targets[@]}"

readonly folder="$(mktemp -d --tmpdir fuzz.XXXXXX)"
failed=()
for target in "${targets[@]}"; do
  name="${target##*:}"
  echo "=== ${name}: ${seconds} s"
  mkdir "${folder}/${name}"
  # The first folder takes what is new, the second is only read.
  bazel run --config=fuzz --noshow_progress "${target}" -- -max_total_time="${seconds}" -timeout=10 -print_final_stats=1 \
    -artifact_prefix="${folder}/${name}-" "${folder}/${name}" "${PWD}/tests/testdata/fuzz/${name}" || failed+=("${name}")
done

if ((${#failed[@]})); then
  echo "fuzz: findings in ${failed[*]}:" >&2
  find "${folder}" -maxdepth 1 -type f >&2
  exit 1
fi
echo "fuzz: nothing found"
