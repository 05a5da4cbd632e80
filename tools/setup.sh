#!/usr/bin/env bash
# Makes a fresh Debian 12 ready to build and test: installs the packages that are missing, and writes debian.bazelrc, which
# tells Debian's Bazel where its rule repositories are. Touches nothing else; takes no time when nothing is missing. Arguments
# are further packages.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly root
readonly packages=(
  # Toolchain
  bazel-bootstrap bazel-rules-java bazel-rules-proto g++ git pkg-config python3 python3-pip python3-venv
  # Libraries
  libabsl-dev libbenchmark-dev libgloo-dev libgmock-dev libgtest-dev libre2-dev libspdlog-dev libyaml-cpp-dev nlohmann-json3-dev
  # Example: Unicode tables and the text that it learns from
  libutf8proc-dev wordnet-base
  # Format check, API reference
  clang-format doxygen
)

missing=()
for package in "${packages[@]}" "$@"; do
  if ! dpkg-query -W -f='${db:Status-Status}\n' "${package}" 2>/dev/null | grep -qx installed; then
    missing+=("${package}")
  fi
done
command -v npm >/dev/null || missing+=(npm) # buildifier comes with it; a newer npm than Debian's is as good
if ((${#missing[@]})); then
  echo "setup: installing ${missing[*]}"
  as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || { echo "setup: run as root, or install sudo" >&2; exit 1; }
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    >/dev/null
fi

readonly rc="${root}/debian.bazelrc"
if [[ -d /usr/share/bazel/rules ]]; then
  wanted="# Written by tools/setup.sh for Debian's bazel-bootstrap, which ships rule repositories instead of fetching them.
common --override_repository=platforms=/usr/share/bazel/platforms
common --override_repository=rules_java=/usr/share/bazel/rules/java
common --override_repository=rules_proto=/usr/share/bazel/rules/proto
common --override_repository=rules_cc=${root}/third_party/debian_bazel/rules_cc
common --override_repository=remote_coverage_tools=${root}/third_party/debian_bazel/remote_coverage_tools
# Debian turns it on, in /etc/bazel/bazelrc: twenty lines an action.
build --nosandbox_debug"
  if [[ "$(cat "${rc}" 2>/dev/null)" != "${wanted}" ]]; then
    printf '%s\n' "${wanted}" >"${rc}"
    echo "setup: wrote ${rc#"${root}/"}"
  fi
fi
