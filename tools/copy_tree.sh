#!/usr/bin/env bash
# Copies this tree to a folder, as an archive of it would have it: without git and what git ignores.
set -euo pipefail
destination="$(realpath -m -- "${1:?"give a folder"}")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p "${destination}"
tar -c --exclude=.git --exclude-from=<(sed 's|^/|./|; s|/$||' .gitignore) . | tar -x -C "${destination}"
