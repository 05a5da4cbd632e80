"""Writes what transformers' BertModel makes of real sentences, for the test of the C++ encoder.

    python make_encoder_fixture.py --model DIR --wordnet data.noun --output tests/testdata/encoder_fixture.safetensors

DIR holds all-MiniLM-L6-v2. The file has one padded batch, of glosses with their examples and of a single word:
  input_ids, attention_mask   int64 [batch, sequence]
  hidden                      float32 [batch, sequence, hidden], of the first two sentences and their tokens alone
  embeddings                  float32 [batch, hidden]: the mean over the tokens, scaled to length 1
"""

import argparse
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, BertModel

GLOSSES = 31
GLOSS_STRIDE = 2600  # Spread over the whole file.
MAX_LENGTH = 64
WITH_HIDDEN = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--wordnet", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    # The plain implementation: written out, and not one of several kernels.
    model = BertModel.from_pretrained(arguments.model, add_pooling_layer=False, attn_implementation="eager").eval()

    lines = arguments.wordnet.read_text(encoding="utf-8").splitlines()
    glosses = [line.split(" | ", 1)[1].strip() for line in lines if not line.startswith("  ")]
    sentences = ["cat"] + glosses[::GLOSS_STRIDE][:GLOSSES]
    assert len(sentences) == GLOSSES + 1

    batch = tokenizer(sentences, padding="longest", truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
    with torch.no_grad():
        hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    weights = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    means = (hidden * weights).sum(1) / weights.sum(1)
    tensors = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "hidden": (hidden * weights)[:WITH_HIDDEN].contiguous(),
        "embeddings": torch.nn.functional.normalize(means, dim=-1),
    }
    save_file(tensors, arguments.output)
    print({name: tuple(tensor.shape) for name, tensor in tensors.items()})


if __name__ == "__main__":
    main()
