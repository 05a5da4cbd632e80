#!/usr/bin/env bash
# Runs tests, those of the arguments or all, with AddressSanitizer (leaks included) and UndefinedBehaviorSanitizer in one build,
# then with ThreadSanitizer in another. What a sanitizer finds fails the test, and is in its output; the last lines name these
# tests. .bazelrc says which tests are left out under sanitizers, and why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly targets=("${@:-//...}")
log="$(mktemp)"
readonly log
trap 'rm -f "${log}"' EXIT

tools/setup.sh

failed=()
# Tests with the configs after `$1`, which is their name in messages.
sanitize() {
  local -r name="$1"
  shift
  echo "=== ${name}"
  bazel test "$@" --keep_going --noshow_progress --test_summary=terse -- "${targets[@]}" 2>&1 | tee "${log}" && return
  local tests
  mapfile -t tests < <(sed -nE "s/^(\/\/[^ ]+) +(FAILED|TIMEOUT|NO STATUS).*/${name}: \1/p" "${log}" | sort -u)
  failed+=("${tests[@]:-${name}: the build, see above}")
}
sanitize asan+ubsan --config=asan --config=ubsan
sanitize tsan --config=tsan

if ((${#failed[@]})); then
  printf 'sanitize: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "sanitize: nothing found"
