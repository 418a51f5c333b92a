#!/usr/bin/env bash
# accelerate 1.15.0 (torch 2.13.0 CPU, safetensors 0.8.0), 2026-11-29.
#
# `accelerate.load_checkpoint_in_model(model, folder, dtype=torch.float16)`: the documentation says that the weights are
# converted to that dtype when they are loaded.
# Expected: floating-point weights become float16; integers, booleans and complex numbers stay.
# Seen: without `device_map` nothing is converted, and nothing says so. With `device_map={"": "cpu"}` the weights are
#   float16, and so are tensors that are no plain weights: a complex buffer loses its imaginary part (1j becomes 0), an FP8
#   tensor becomes float16 without its scale, and a float32 buffer of 70000 becomes inf. Integers and booleans stay.
#
# Exits 0 while this is as seen, 1 if it changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 accelerate==1.15.0 safetensors==0.8.0 numpy
cat > "$work/run.py" <<'PY'
import sys
import warnings

import accelerate
import torch
from safetensors.torch import save_file

warnings.simplefilter("ignore")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("rotation", torch.zeros(1, dtype=torch.complex64))
        self.register_buffer("packed", torch.zeros(1).to(torch.float8_e4m3fn))


folder = sys.argv[1]
state = {
    "weight": torch.tensor([1.5, 2.5]),
    "count": torch.tensor([2**40]),
    "scale": torch.tensor([1.0, 70000.0]),
    "rotation": torch.tensor([1j]),
    "packed": torch.ones(1).to(torch.float8_e4m3fn),
}
save_file(state, f"{folder}/model.safetensors", metadata={"format": "pt"})


def loaded(**options):
    model = Model()
    accelerate.load_checkpoint_in_model(model, folder, dtype=torch.float16, **options)
    return {name: (str(tensor.dtype).removeprefix("torch."), tensor.tolist()) for name, tensor in model.state_dict().items()}


plain, mapped = loaded(), loaded(device_map={"": "cpu"})
print("without a device_map:", plain)
print("with one:            ", mapped)
as_seen = (
    plain["weight"][0] == "float32"
    and plain["rotation"] == ("complex64", [1j])
    and mapped["weight"] == ("float16", [1.5, 2.5])
    and mapped["count"] == ("int64", [2**40])
    and mapped["scale"] == ("float16", [1.0, float("inf")])
    and mapped["rotation"] == ("float16", [0.0])
    and mapped["packed"][0] == "float16"
)
sys.exit(0 if as_seen else 1)
PY
"$work/venv/bin/python" "$work/run.py" "$work"
