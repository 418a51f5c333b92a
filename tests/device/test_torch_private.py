"""The private names of torch: a release that lacks one is noticed, and loads and saves then take public names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from native.support import run_script

from stio.device.torch_private import PUBLIC_WAYS, _from_dlpack, _private

SCRIPT = """
import sys
import torch

{hide}
import stio
import stio.sync
from stio.device import TORCH_DTYPES, torch_private

left = [name for name in torch_private.PUBLIC_WAYS if torch_private._private(name) is not None]
assert left == ["_C._from_dlpack"], left


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        a, b = (t.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (tensor, other[name]))
        assert tensor.shape == other[name].shape and torch.equal(a, b), name


def bits(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


dtypes = [dtype for name, dtype in TORCH_DTYPES.items() if name != "BOOL"]
state = {{str(dtype): bits(dtype, k) for k, dtype in enumerate(dtypes)}}
state |= {{"bool": torch.tensor([True, False]), "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3)}}
state |= {{"conj": torch.tensor([1 + 2j]).conj(), "rows": torch.arange(12.0).view(3, 4).t()}}
stio.sync.save(state, sys.argv[1])
for memory in ("map", "copy", "auto"):
    same(stio.sync.load(sys.argv[1], memory=memory), state)
target = {{name: torch.zeros_like(tensor.resolve_conj()) for name, tensor in state.items()}}
addresses = {{name: tensor.data_ptr() for name, tensor in target.items()}}
module = torch.nn.Module()
for k, (name, tensor) in enumerate(target.items()):
    module.register_buffer(name.replace(".", "-"), tensor)
stio.sync.save({{name.replace(".", "-"): tensor for name, tensor in state.items()}}, sys.argv[2])
stio.sync.load_into(module, sys.argv[2])
same(target, state)
assert addresses == {{name: tensor.data_ptr() for name, tensor in target.items()}}
print("done")
"""


@pytest.mark.parametrize("name", PUBLIC_WAYS)
def test_torch_has_each_private_name(name: str) -> None:
    """If this fails, loads and saves still work, and are slower: look for another fast way."""
    assert _private(name) is not None, f"torch {torch.__version__} lacks {name}; now: {PUBLIC_WAYS[name]}"


def test_a_tensor_of_a_capsule_by_the_public_function() -> None:
    array = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    made = _from_dlpack(array.__dlpack__())
    assert made.data_ptr() == array.ctypes.data and made.tolist() == array.tolist()


@pytest.mark.costly("a fresh interpreter, whose torch lacks the names")
def test_public_names_do_the_same(tmp_path: Path) -> None:
    """All but the first, without which `torch.from_dlpack` does not work either."""
    script = SCRIPT.format(hide="\n".join(f"del torch.{name}" for name in PUBLIC_WAYS if name != "_C._from_dlpack"))
    done = run_script(script, tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert done.stdout == "done\n", done.stderr
