#!/usr/bin/env bash
# Builds all benchmarks, runs them one after the other, and writes a report of all as benchmarks.md and benchmarks.json:
#
#   tools/bench.sh [--device=cpu|cuda] [--filter=REGEX] [--quick] [--output=FOLDER] [-- FLAG_OF_GOOGLE_BENCHMARK...]
#
# REGEX is of labels such as //tests/lora:dora_benchmark; FOLDER is bench_results unless given. --quick runs each case once, to see
# that all work. Fails if a benchmark fails or measures nothing, but for want of a GPU.
#
# For a machine with a GPU and PyTorch 2.11.0 for CUDA 13 but no Bazel, packs what is built for CUDA, with the tests for GPUs:
#
#   tools/bench.sh --pack=FILE.tar.gz
#
# There: tar -xf FILE.tar.gz, then trainer_lora_bench/run.sh with the arguments of the first form; --device=cuda unless given.
set -euo pipefail

device=cpu
pack=
arguments=()
while (($#)); do
  case "$1" in
    --device=*) device="${1#*=}" && arguments+=("$1") ;;
    --output=*) arguments+=("--output=$(realpath -m -- "${1#*=}")") ;;
    --pack=?*) pack="$(realpath -m -- "${1#*=}")" ;;
    --) arguments+=("$@") && break ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
if [[ -n "${pack}" ]] && ((${#arguments[@]})); then
  echo "bench: ${arguments[*]}: --pack packs everything; give these to run.sh" >&2
  exit 1
fi
readonly device pack arguments

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh

# bazel-bin and bazel-testlogs stay those of other builds.
options=(--compilation_mode=opt --experimental_convenience_symlinks=ignore)
[[ "${device}" == cpu && -z "${pack}" ]] || options+=(--config=cuda)
readonly options
readonly smoke_tests='attr(tags, "\bbenchmark\b", //tests/...)' gpu_tests='attr(tags, "\bgpu\b", //tests/...)'
# Of a tree without git it is not known.
readonly commit="$(git describe --always --dirty --exclude='*' 2>/dev/null || echo unknown)"
work="$(mktemp -d --tmpdir bench.XXXXXX)"
readonly work
trap 'rm -rf "${work}"' EXIT

query() { bazel query --noshow_progress "$@"; }
to_paths() { sed 's|^//||; s|:|/|'; }

query --output=xml --relative_locations "${smoke_tests}" >"${work}/benchmarks.xml"
labels="$(python3 tools/run_benchmarks.py --targets="${work}/benchmarks.xml" --list "${arguments[@]}")"
[[ -z "${pack}" ]] || labels+=$'\n'"$(query "${gpu_tests}")"
mapfile -t targets <<<"${labels}"
bazel build "${options[@]}" "${targets[@]}"
binaries="$(bazel info --noshow_progress "${options[@]}" bazel-bin)"
readonly binaries

if [[ -z "${pack}" ]]; then
  python3 tools/run_benchmarks.py --targets="${work}/benchmarks.xml" --binaries="${binaries}" --commit="${commit}" \
    "${arguments[@]}"
  exit
fi

readonly folder="${work}/trainer_lora_bench"
mkdir -p "${folder}/bin" "${folder}/lib"
for path in $(to_paths <<<"${labels}"); do
  mkdir -p "$(dirname "${folder}/bin/${path}")"
  strip -o "${folder}/bin/${path}" "${binaries}/${path}"
  # What a program is linked with is from the wheels, there on any machine with a compiler's runtime, or packed.
  ldd "${binaries}/${path}" | awk '$2 == "=>" && $3 !~ "/_U@libtorch_" && $1 !~ "^lib(c|m|dl|rt|util|pthread|gcc_s|stdc\\+\\+)\\.so" {print $3}'
done | sort -u | xargs --no-run-if-empty cp --target-directory="${folder}/lib"
query "${gpu_tests}" | to_paths >"${folder}/gpu_tests"
echo "${commit}" >"${folder}/commit"
cp tools/run_benchmarks.py "${work}/benchmarks.xml" "${folder}"
cp tools/run_packed_benchmarks.sh "${folder}/run.sh"

mkdir -p "$(dirname "${pack}")"
tar -c --sort=name --owner=0 --group=0 --numeric-owner -C "${work}" trainer_lora_bench | gzip -9 >"${pack}"
bytes="$(stat --format=%s "${pack}")"
readonly bytes limit=60000000
if ((bytes >= limit)); then
  echo "bench: ${pack} has ${bytes} bytes, and may have ${limit}: see which program grew with tar -tvf" >&2
  exit 1
fi
echo "bench: wrote ${pack}, ${bytes} bytes"
