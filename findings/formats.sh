#!/bin/bash
# The metadata `format` of a safetensors file decides less than it did, and differently in each library.
#
# Versions: transformers 5.23.0, accelerate 1.15.0, safetensors 0.8.0, torch 2.13.0 (CPU).
# Input: a model saved by transformers whose file says `format: other` in place of `format: pt`, with the same tensors; and
#   one with that format and tensors of other names.
# Expected: each library refuses a format that it does not know, as transformers 4 did ("does not contain the valid metadata"),
#   or each takes it.
# Seen: transformers takes both. Of the second file it uses nothing: the weights are random, and the call returns; only the
#   logger has a report. accelerate raises OSError for both.
# Exits 1 if this behaviour changes.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "accelerate==1.15.0" "safetensors==0.8.0" numpy \
  2>"$work/pip.log" || { tail -5 "$work/pip.log"; exit 2; }
cat > "$work/run.py" <<'PY'
import sys
from pathlib import Path

import accelerate, torch, transformers
from accelerate.utils import load_state_dict
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
config = LlamaConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=64
)
folder = Path(sys.argv[1])
model = LlamaForCausalLM(config)
model.save_pretrained(folder)
file = folder / "model.safetensors"
tensors = load_file(file)


def equal() -> str:
    try:
        found = LlamaForCausalLM.from_pretrained(folder)
    except Exception as error:
        return type(error).__name__
    pairs = zip(model.parameters(), found.parameters())
    return "equal" if all(torch.equal(one, other) for one, other in pairs) else "other weights, no error"


def by_accelerate() -> str:
    try:
        return f"{len(load_state_dict(str(file)))} tensors"
    except Exception as error:
        return type(error).__name__


seen = []
for renamed in (False, True):
    save_file({f"other.{name}" if renamed else name: one for name, one in tensors.items()}, file, {"format": "other"})
    seen.append((equal(), by_accelerate()))
print("transformers", transformers.__version__, "accelerate", accelerate.__version__)
print("the same names:  transformers:", seen[0][0], "| accelerate:", seen[0][1])
print("other names:     transformers:", seen[1][0], "| accelerate:", seen[1][1])
raise SystemExit(0 if seen == [("equal", "OSError"), ("other weights, no error", "OSError")] else 1)
PY
"$work/venv/bin/python" "$work/run.py" "$work/model"
