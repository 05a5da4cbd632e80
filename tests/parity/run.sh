#!/usr/bin/env bash
# Compares this component with the Python libraries: trains an adapter for a few steps on two ranks, and has PEFT open it.
# Makes the sharded checkpoints of tests/testdata again, has PyTorch shard them, and has PEFT compute its variants of LoRA.
# The optional argument is a file for the results as JUnit XML.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tools/setup.sh
source tests/parity/environment.sh

work="$(mktemp -d)"
readonly work
trap 'rm -rf "${work}"' EXIT

bazel build //examples/sentence_encoder:train //tests/parity:embed //tests/parity:save_variants
bazel-bin/examples/sentence_encoder/train --config=tests/parity/short.yaml --output="${work}/adapter"
bazel-bin/tests/parity/embed --config=tests/parity/short.yaml --adapter="${work}/adapter" \
  --output="${work}/embeddings.safetensors"
mkdir "${work}/variants"
bazel-bin/tests/parity/save_variants --folder="${work}/variants"

export HF_HUB_OFFLINE=1
export PARITY_BASE_MODEL="bazel-bin/examples/sentence_encoder/train.runfiles/minilm"
export PARITY_ADAPTER="${work}/adapter"
export PARITY_EMBEDDINGS="${work}/embeddings.safetensors"
export PARITY_VARIANTS="${work}/variants"
"${python}" -m pytest --quiet -p no:cacheprovider ${1:+"--junitxml=$1"} \
  tests/parity/checkpoint_fixture_test.py tests/parity/peft_test.py tests/parity/variants_adapter_test.py \
  tests/parity/variants_fixture_test.py
