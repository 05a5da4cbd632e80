#!/usr/bin/env bash
# Runs the test cases of the Python modules that are named. A py_test of Debian's Bazel asks for `python`, which Debian 12 lacks.
exec python3 -m unittest "$@"
