#!/usr/bin/env bash
# The run.sh of an archive that tools/bench.sh --pack makes: runs the tests for GPUs, then the benchmarks, with the libraries of the
# PyTorch that python3 has installed. Arguments are those of tools/bench.sh; --device=cuda unless given.
set -euo pipefail

folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly folder
run_benchmarks() {
  python3 "${folder}/run_benchmarks.py" --targets="${folder}/benchmarks.xml" --binaries="${folder}/bin" \
    --commit="$(<"${folder}/commit")" --device=cuda "$@"
}
run_benchmarks --list "$@" >/dev/null # Arguments that are wrong are so before the tests.

# The folders of libtorch and of NVIDIA's libraries that came with it; torch itself is not imported.
libraries="$(python3 - <<'PYTHON'
import importlib.util
import pathlib
import runpy
import sys

needed = "PyTorch 2.11.0 for CUDA 13 is needed"
torch = importlib.util.find_spec("torch")
if torch is None:
    sys.exit(f"run: {sys.executable} has no torch: {needed}")
folder = pathlib.Path(torch.origin).parent
version = runpy.run_path(str(folder / "version.py"))
if version["__version__"].split("+")[0] != "2.11.0" or (version["cuda"] or "").split(".")[0] != "13":
    sys.exit(f"run: {sys.executable} has torch {version['__version__']} for CUDA {version['cuda']}: {needed}")
nvidia = importlib.util.find_spec("nvidia")
roots = nvidia.submodule_search_locations if nvidia else []
print(folder / "lib", *(path for root in roots for path in sorted(pathlib.Path(root).glob("*/lib"))), sep=":")
PYTHON
)"
export LD_LIBRARY_PATH="${libraries}:${folder}/lib${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}"
mapfile -t gpu_tests <"${folder}/gpu_tests"
missing="$(ldd "${gpu_tests[@]/#/"${folder}/bin/"}" | awk '/not found/ {print $1}' | sort -u)"
if [[ -n "${missing}" ]]; then
  echo "run: not found: ${missing//$'\n'/ }: install what torch 2.11.0 requires, or add their folder to LD_LIBRARY_PATH" >&2
  exit 1
fi

failed=()
for test in "${gpu_tests[@]}"; do
  echo "=== ${test}"
  (cd "${folder}" && timeout --kill-after=10 300 "bin/${test}") || failed+=("${test}")
done
run_benchmarks "$@" || failed+=("benchmarks")
if ((${#failed[@]})); then
  echo "run: failed: ${failed[*]}" >&2
  exit 1
fi
