#!/usr/bin/env bash
# Compares this component with the Python libraries: trains an adapter for a few steps on two ranks, and has PEFT open it;
# prints how much faster a configuration is read.
# The optional argument is a file for the results as JUnit XML.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly requirements=tests/parity/requirements.txt
readonly environment="${XDG_CACHE_HOME:-${HOME}/.cache}/trainer_lora/python-$(sha256sum "${requirements}" | cut -c1-16)"
if [[ ! -e "${environment}/complete" ]]; then
  echo "parity: installing ${requirements}, once"
  python3 -m venv --clear "${environment}"
  "${environment}/bin/pip" install --quiet --disable-pip-version-check --requirement "${requirements}"
  touch "${environment}/complete"
fi

readonly work="$(mktemp -d)"
trap 'rm -rf "${work}"' EXIT

bazel build //examples/sentence_encoder:train //tests/parity:embed
bazel-bin/examples/sentence_encoder/train --config=tests/parity/short.yaml --output="${work}/adapter"
bazel-bin/tests/parity/embed --config=tests/parity/short.yaml --adapter="${work}/adapter" \
  --output="${work}/embeddings.safetensors"

export HF_HUB_OFFLINE=1
export PARITY_BASE_MODEL="bazel-bin/examples/sentence_encoder/train.runfiles/minilm"
export PARITY_ADAPTER="${work}/adapter"
export PARITY_EMBEDDINGS="${work}/embeddings.safetensors"
"${environment}/bin/python" -m pytest --quiet -p no:cacheprovider ${1:+"--junitxml=$1"} tests/parity/peft_test.py

bazel build --compilation_mode=opt //tests/config:lora_config_benchmark
bazel-bin/tests/config/lora_config_benchmark --benchmark_filter=TypicalFile/ --benchmark_format=json >"${work}/speed.json"
"${environment}/bin/python" tests/parity/config_speed.py "${work}/speed.json"
