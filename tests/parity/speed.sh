#!/usr/bin/env bash
# Times this component against the Python libraries on this machine, one line a comparison. Nothing is asserted: machines are
# noisy, and the ratios are what counts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tools/setup.sh
source tests/parity/environment.sh

work="$(mktemp -d)"
readonly work
trap 'rm -rf "${work}"' EXIT

# compare <benchmark> <filter> <script>: has the script compare Python with the benchmark's results.
compare() {
  bazel-bin/tests/"$1" --benchmark_filter="$2" --benchmark_repetitions=5 --benchmark_format=json \
    >"${work}/result.json"
  "${python}" "tests/parity/$3" "${work}/result.json"
}

bazel build --compilation_mode=opt //tests/config:lora_config_benchmark //tests/lora:layer_replacement_benchmark \
  //tests/lora:lora_matmul_benchmark //tests/parity:load_shards
compare config/lora_config_benchmark BM_TypicalFile/ config_speed.py
compare lora/layer_replacement_benchmark BM_EnableLoraTraining injection_speed.py
compare lora/lora_matmul_benchmark '^LoraMatmul/1536/1024/[0-9]+/Float' adapter_speed.py

readonly weights="${work}/weights.safetensors"
"${python}" tests/parity/loader_speed.py "${weights}" --create
"${python}" tests/parity/loader_speed.py "${weights}" --ours "bazel-bin/tests/parity/load_shards --file={file}"
