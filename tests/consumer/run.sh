#!/usr/bin/env bash
# Builds and tests this workspace as a monorepo of its own that has this repository in third_party/trainer_lora, in a folder
# for temporary files. First checks that the README's lines for consumers are those of this workspace. The optional argument
# is a file for the results as JUnit XML.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tools/setup.sh

# A block after `<!-- consumer FILE -->` stands in tests/consumer/FILE as it is.
readonly files=(.bazelrc BUILD.bazel WORKSPACE)
for file in "${files[@]}"; do
  block="$(awk -v mark="<!-- consumer ${file} -->" '$0 == mark {found = 1} found && /^```$/ {exit}
    code {print} found && /^```[a-z]/ {code = 1}' README.md)"
  if [[ -z "${block}" || "$(<"tests/consumer/${file}")" != *"${block}"* ]]; then
    echo "consumer: README.md has no lines of tests/consumer/${file} after <!-- consumer ${file} -->" >&2
    exit 1
  fi
done

folder="$(mktemp -d --tmpdir consumer.XXXXXX)"
readonly folder
readonly monorepo="${folder}/monorepo"
# A consumer has its own rc file. This one is of the machine: where Debian's Bazel has its rules, and a disk cache.
cat debian.bazelrc user.bazelrc >"${folder}/machine.bazelrc" 2>/dev/null || true
consumer_bazel() {
  (cd "${monorepo}" && bazel --output_base="${folder}/output" --bazelrc="${folder}/machine.bazelrc" "$@")
}
cleanup() {
  consumer_bazel shutdown
  chmod -R u+w "${folder}"
  rm -rf "${folder}"
}
trap cleanup EXIT

readonly vendored="${monorepo}/third_party/trainer_lora"
tools/copy_tree.sh "${vendored}"
cp -r "${vendored}/tests/consumer/." "${monorepo}"
sed -i 's|path = "\.\./\.\."|path = "third_party/trainer_lora"|' "${monorepo}/WORKSPACE"

# With two tests of ours, which find their files there, and its GoogleTest.
consumer_bazel test //:all @trainer_lora//tests/config:trainer_config_test @trainer_lora//tests/tools:run_benchmarks_test
# Every library of ours loads from there too, not only those in use.
consumer_bazel build --nobuild @trainer_lora//:all @trainer_lora//config/... @trainer_lora//distributed/... \
  @trainer_lora//lora/...
[[ -z "${1:-}" ]] || cp "${monorepo}/bazel-testlogs/trainer_test/test.xml" "$1"
