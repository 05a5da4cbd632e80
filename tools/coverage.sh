#!/usr/bin/env bash
# Runs tests, those of the arguments or all, and prints which lines of the libraries they did not run, by file, and the share of
# those that they ran, by folder. Without arguments it fails below 90 % of the lines of config, distributed or lora.
#
# g++ counts, gcov reads the counters, gcovr adds up: `bazel coverage` needs programs that Debian's Bazel comes without.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

minimum=90
(($# == 0)) || minimum=0
readonly minimum targets=("${@:-//...}")

tools/setup.sh gcovr

# Each program counts into the files next to its object files, where gcov looks for them; those that run at the same time add to
# the same ones. g++ has left /proc/self/cwd/ in front of their names: three components that the prefix takes the place of.
execution_root="$(bazel info --noshow_progress execution_root)"
readonly execution_root
readonly counters="${execution_root}/bazel-out/k8-fastbuild-coverage"
mkdir -p "${counters}"
find "${counters}" -name '*.gcda' -delete
bazel test --config=coverage --noshow_progress --nocache_test_results --sandbox_writable_path="${counters}" \
  --test_env=GCOV_PREFIX="${execution_root}" --test_env=GCOV_PREFIX_STRIP=3 -- "${targets[@]}"

report="$(mktemp --suffix=.json)"
readonly report
trap 'rm -f "${report}"' EXIT
# gcov finds the sources below the folder where they were compiled.
pushd "${execution_root}" >/dev/null
gcovr -j --root=. --json="${report}" bazel-out/k8-fastbuild-coverage
popd >/dev/null
gcovr --add-tracefile="${report}" --filter='(config|distributed|lora)/'
for source in $(find config distributed lora -name '*.cc' | sort); do
  grep -qF "\"${source}\"" "${report}" || echo "not compiled for these tests: ${source}"
done

exit_status=0
for folder in config distributed distributed/checkpoint lora; do
  summary="$(gcovr --add-tracefile="${report}" --filter="${folder}/" --fail-under-line="${minimum}" --print-summary \
    --output=/dev/null)" || {
    exit_status=1
    echo "coverage: ${folder}: less than ${minimum} % of the lines ran: the list above says which did not" >&2
  }
  printf '%-24s %s\n' "${folder}" "$(sed -n 's/^lines: //p' <<<"${summary}")"
done
exit "${exit_status}"
