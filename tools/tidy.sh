#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy, on as many sources at a time as there are cores:
#
#   tools/tidy.sh                     all; takes long, as libtorch costs each source half a minute
#   tools/tidy.sh FILE...             these
#   tools/tidy.sh --since REVISION    those that differ from a revision of git
#   tools/tidy.sh --torch-free        those of libraries without libtorch, as lint does
#
# Headers of ours are checked with the sources that include them: for a header, that is its own source, or one of the others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh clang-tidy
tools/compile_commands.sh
exec python3 tools/tidy.py "$@"
