#!/usr/bin/env bash
# Runs tests, those of the arguments or all, by remote execution alone on a worker of this machine: first with nothing cached,
# then from the worker's cache. Fails if a test fails, or if an action was not run where it should have been.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ -n "${REMOTE_EXECUTOR:-}" ]] || exec tools/remote_worker.sh tools/test_remote.sh "$@"
tools/setup.sh

readonly targets=("${@:-//...}")
# Next to what this machine has built, which stays.
readonly options=(
  --config=remote --remote_executor="${REMOTE_EXECUTOR}" --platform_suffix=-remote
  --experimental_convenience_symlinks=ignore --noshow_progress
)
outputs="$(bazel info --noshow_progress output_path)"
readonly outputs+=/k8-fastbuild-remote
log="$(mktemp)"
readonly log
trap 'rm -f "${log}"; rm -rf "${outputs}"' EXIT

# Prints how many processes of the last run ran as `$1` says: remote, remote cache hit.
processes() { sed -n "s/^INFO: [0-9]* process.*[:,] \([0-9]*\) $1[,.].*/\1/p" "${log}" | grep . || echo 0; }

# Tests with an empty output folder, and fails if anything ran here.
test_remotely() {
  rm -rf "${outputs}"
  bazel test "${options[@]}" -- "${targets[@]}" 2>&1 | tee "${log}"
  if grep -qE '^INFO: [0-9]* process.* [0-9]+ (local|linux-sandbox|processwrapper-sandbox|worker)' "${log}"; then
    echo "remote: actions ran on this machine" >&2
    exit 1
  fi
}

test_remotely
readonly executed="$(processes remote)"
# A test is compiled, linked and run at least.
tests="$(bazel query --noshow_progress "tests(set(${targets[*]}))" | wc -l)"
if ((tests == 0 || executed < 3 * tests)); then
  echo "remote: ${executed} actions ran remotely, which is too few for ${tests} tests" >&2
  exit 1
fi

test_remotely
readonly hits="$(processes 'remote cache hit')"
if ((hits < executed || $(processes remote) > 0)); then
  echo "remote: ${hits} actions came from the cache, and $(processes remote) ran again, of ${executed}" >&2
  exit 1
fi
echo "remote: ${executed} actions of ${tests} tests ran remotely, then came from the cache"
