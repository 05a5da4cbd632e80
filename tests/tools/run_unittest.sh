#!/usr/bin/env bash
# Runs the test cases of the Python modules that are named. A py_test of Debian's Bazel asks for `python`, which Debian 12 lacks.
set -euo pipefail
# The root of our files, in a workspace that depends on ours too.
cd "$(dirname "$0")/../.."
exec python3 -m unittest "$@"
