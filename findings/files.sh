#!/bin/bash
# Two surprises of writers of checkpoints: valid input, no error when saving, and something else or nothing when loading.
#
# 1. torch 2.13.0: torch.save(..., _use_new_zipfile_serialization=False) writes tensors of uint16, uint32, uint64,
#    float8_e4m3fn and float8_e5m2 without a warning, and no torch.load can read the file again, with weights_only or without.
#    Expected: the tensor, as for bfloat16; or an error when saving.
#    Seen: AttributeError: type object 'torch.storage.UntypedStorage' has no attribute 'dtype'
# 2. flashpack 0.4.5: a tensor without dimensions comes back with the shape [1], by revert_from_file().
#    Expected: torch.Size([])
#    Seen: torch.Size([1])
#
# Exits with 1 if the behaviour has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 flashpack==0.4.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import flashpack
import torch

print("torch", version("torch"), "flashpack", version("flashpack"))
failed = []
for dtype in (torch.bfloat16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
    torch.save({"x": torch.ones(3).to(dtype)}, "old.pt", _use_new_zipfile_serialization=False)
    for weights_only in (True, False):
        try:
            print(dtype, weights_only, torch.load("old.pt", weights_only=weights_only)["x"].dtype)
        except AttributeError as error:
            print(dtype, weights_only, error)
            failed.append(dtype)
flashpack.pack_to_file({"w": torch.ones(2, 3), "scalar": torch.tensor(1.0)}, "m.flashpack", None)
shape = flashpack.deserialization.revert_from_file("m.flashpack")["scalar"].shape
print("scalar", shape)
sys.exit(not (len(failed) == 10 and torch.bfloat16 not in failed and shape == torch.Size([1])))
PYTHON
