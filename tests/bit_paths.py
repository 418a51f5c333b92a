"""The paths by which tensors come from files into memory and back, and bit patterns that none of them may change.

A path is a function of a `Case`: it moves the tensors of the case in one way, and returns what has arrived. `patterns`
has all bit patterns of dtypes of 8 and 16 bits; for wider ones quiet and signalling NaNs of both signs, infinities,
subnormals, both zeros, and random bits. Paths that load a checkpoint are tried with a delta too. `test_bits.py` runs all paths on the CPU, `gpu/test_bits.py` on a device, and
`distributed/test_bits.py` those of several ranks.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import deltas
import numpy as np
import torch
from counts import count
from fakes import write_checkpoint
from remote.servers import http_server
from support import module_of
from torch import nn
from torch.distributed import checkpoint as dcp

import stio
from stio import sync
from stio.compat import huggingface_hub as hub
from stio.compat import olmo
from stio.compat.safetensors import numpy as numpy_drop_in
from stio.compat.safetensors import safe_open
from stio.compat.safetensors import torch as drop_in
from stio.device.tensors import TORCH_DTYPES
from stio.distributed import StioStager, StioStorageReader, StioStorageWriter
from stio.format.dtypes import BITS
from stio.loading import planned

Tensors = dict[str, torch.Tensor]

DTYPES = list(TORCH_DTYPES)
"""The dtypes of the format that this torch has. Tensors of other dtypes cannot be loaded."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KINDS = {  # exponent bits of all ones, bits of the fraction
    "F16": (0x7C00, 10),
    "BF16": (0x7F80, 7),
    "F32": (0x7F800000, 23),
    "F64": (0x7FF0000000000000, 52),
}
_NUM_RANDOM = 3000
ALONE = ["BF16", "F16", "F8_E5M2", "BOOL", "F8_E4M3", "U16"]
"""Dtypes that are moved alone too: lists of tensors of one dtype and device go to CUDA's kernels, which compute."""

LARGE_BYTES = 2 << 20
"""Tensors from here on are copied directly to their own memory on a device."""
_ON_A_REAL_DEVICE = torch.accelerator.is_available() and os.environ.get("STIO_TEST_DEVICE") != "sim"
_LARGE_ONES_EVERY = 1 if _ON_A_REAL_DEVICE else count(4, 1)


def taking_turns(dtypes: Sequence[str], row: int) -> Sequence[str]:
    """Return the dtypes that are tried in a row of a table: one of them in `make test`."""
    return dtypes if _LARGE_ONES_EVERY == 1 else [dtypes[row % len(dtypes)]]


@cache
def patterns(dtype: str) -> torch.Tensor:
    """Return bit patterns of a dtype, each an element: a tensor of integers `[count]` of its size."""
    width = 8 if dtype == "F4" else BITS[dtype]  # a byte of F4 has two numbers
    if width <= 16:
        return torch.arange(1 << width).to(INTEGERS[width // 8])  # the larger ones become negative
    chance = bytearray(random.Random(1).randbytes(_NUM_RANDOM * width // 8))
    found = [torch.frombuffer(chance, dtype=INTEGERS[width // 8])]
    kind = "F32" if dtype == "C64" else dtype
    if kind in KINDS:
        infinity, fraction = KINDS[kind]
        quiet = 1 << fraction - 1
        nans = [infinity | quiet, infinity | quiet | 5, infinity | 2 * quiet - 1, infinity | 1, infinity | quiet - 1]
        values = [0, 1, quiet, 2 * quiet - 1, infinity, infinity - 1, *nans]
        sign = 1 << infinity.bit_length()
        both = torch.tensor([value - 2 * (value & sign) for one in values for value in (one, one | sign)])
        special = both.to(INTEGERS[8 if kind == "F64" else 4])
        if dtype == "C64":  # each pattern as real and as imaginary part
            special = torch.cartesian_prod(special, special).contiguous().view(torch.int64).flatten()
        found.insert(0, special)
    return torch.cat(found)


@cache
def tensors() -> Tensors:
    """Return tensors of each dtype with all its patterns: a matrix, a cube, a vector, a scalar, and a large one.

    In `make test` each fourth dtype has a large one: they take most of the time.
    """
    found: Tensors = {}
    for k, dtype in enumerate(DTYPES):
        given = patterns(dtype)
        whole = given.repeat(-(-512 // len(given)))
        matrix = whole[: len(whole) // 16 * 16].view(16, -1)
        large = given.repeat(-(-LARGE_BYTES // given.nbytes))
        shapes = {
            "matrix": matrix, "cube": whole[: len(whole) // 32 * 32].view(4, -1, 8), "vector": whole[-333:],
            "scalar": whole[-7:-6] if dtype == "F4" else whole[-7], "large": large[: len(large) // 256 * 256].view(256, -1),
        }  # fmt: skip
        if k % _LARGE_ONES_EVERY:
            del shapes["large"]
        found |= {f"{dtype}.{name}": one.clone().view(TORCH_DTYPES[dtype]) for name, one in shapes.items()}
    return found


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers of the same size; a view, which shares its memory."""
    return tensor.detach().view(INTEGERS[tensor.itemsize])


def require_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and each bit.

    Raises:
        AssertionError: It says of each tensor that differs how many elements do, and the first of them.
    """
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    wrong = []
    for name, one in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (one.dtype, one.shape), (name, other.dtype, other.shape)
        # Moved as integers: what compares must not change a bit either.
        bits, right = integers(other).cpu().flatten(), integers(one).cpu().flatten()
        if differing := (bits != right).nonzero().flatten().tolist():
            width, k = one.itemsize * 8, differing[0]
            shown = [f"{int(value) % (1 << width):#0{2 + width // 4}x}" for value in (right[k], bits[k])]
            wrong.append(f"{name}: {len(differing)} of {len(right)} elements, the first {shown[0]} is now {shown[1]}")
    assert not wrong, "bits have changed:\n" + "\n".join(wrong)


def read_files(path: Path) -> Tensors:
    """Return what files of a checkpoint hold, by plain reads."""
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            start, end = info["data_offsets"]
            raw = torch.frombuffer(bytearray(data[8 + size + start : 8 + size + end]), dtype=torch.uint8)
            shape = info["shape"] if info["dtype"] != "F4" else [*info["shape"][:-1], info["shape"][-1] // 2]
            found[name] = raw.view(TORCH_DTYPES[info["dtype"]]).view(shape)
    return found


@dataclass
class Case:
    """What a path moves, and where."""

    folder: Path
    """An empty directory."""
    device: Any
    """`device=` of the path's calls."""
    stack: ExitStack
    """What is closed behind the path."""
    tensors: Tensors = field(default_factory=lambda: tensors())
    """What is moved."""
    stored: Path | None = None
    """A checkpoint with the tensors, such as a delta; None: the case writes one."""
    expected: Tensors = field(init=False)
    """What must arrive; a path that moves parts replaces it."""

    def __post_init__(self) -> None:
        self.expected = self.tensors

    def checkpoint(self) -> Path:
        """Return a directory with the tensors: of two shards, unless it was given."""
        return self.stored or write_checkpoint(self.folder / "checkpoint", self.tensors, 2)

    def file(self) -> Path:
        """Return a single file with the tensors."""
        return write_checkpoint(self.folder / "single", self.tensors, 1) / "model.safetensors"

    def there(self) -> Tensors:
        """Return the tensors on the device, put there as bytes."""
        return {name: at(one, self.device) for name, one in self.tensors.items()}

    def zeros(self, make: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Tensors:
        """Return memory on the device for the tensors, in another layout if `make` is given; no byte is right."""
        found = {}
        for name, one in self.tensors.items():
            filled = torch.full_like(integers(one), 0x5A, device=self.device)
            found[name] = (make(filled) if make else filled).view(one.dtype)
        return found


def at(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Return a tensor on a device, moved as integers."""
    return integers(tensor).to(device).clone().view(tensor.dtype)


Move = Callable[[Case], Mapping[str, torch.Tensor]]
PATHS: dict[str, Move] = {}
"""By name."""
ON_CPU_ONLY: set[str] = set()
"""Names of the paths that end in host memory, whatever the device."""
BY_TORCH: set[str] = set()
"""Names of the paths on which a module's own `load_state_dict` makes the last copy. There torch makes BOOL 0 or 1."""


def path(name: str, *, cpu_only: bool = False, by_torch: bool = False) -> Callable[[Move], Move]:
    """Put a function into the table."""

    def put(function: Move) -> Move:
        assert name not in PATHS
        PATHS[name] = function
        if cpu_only:
            ON_CPU_ONLY.add(name)
        if by_torch:
            BY_TORCH.add(name)
        return function

    return put


# Loads.


@path("load")
def _(case: Case) -> Tensors:
    return sync.load(case.checkpoint(), device=case.device)


@path("load, small budget")
def _(case: Case) -> Tensors:
    return sync.load(case.checkpoint(), device=case.device, budget_bytes=300_000)


@path("load, memory=map", cpu_only=True)
def _(case: Case) -> Tensors:
    return sync.load(case.checkpoint(), memory="map")


@path("load, memory=lazy", cpu_only=True)
def _(case: Case) -> Tensors:
    return {
        name: one.clone() if one.dtype == torch.float32 else one
        for name, one in sync.load(case.checkpoint(), memory="lazy").items()
    }


@path("load, memory=copy", cpu_only=True)
def _(case: Case) -> Tensors:
    return sync.load(case.checkpoint(), memory="copy")


for _memory in ("map", "copy"):

    @path(f"load, memory={_memory}, not at once", cpu_only=True)
    def _(case: Case, memory: Any = _memory) -> Tensors:
        with mock.patch.object(planned, "_AT_ONCE_BYTES", -1):  # by the engine, as large files
            return sync.load(case.checkpoint(), memory=memory)


@path("load, verify")
def _(case: Case) -> Tensors:
    sync.save(sync.load(case.checkpoint()), case.folder / "with digests", hash="sha256")
    return sync.load(case.folder / "with digests", device=case.device, verify=True)


@path("load, cast of each dtype to itself")
def _(case: Case) -> Tensors:
    source, found = case.checkpoint(), {}
    for name, dtype in TORCH_DTYPES.items():
        names = [one for one in case.tensors if one.startswith(f"{name}.")]
        found |= sync.load(source, device=case.device, names=names, dtype=dtype if dtype.is_floating_point else None)
    return found


@path("stream")
def _(case: Case) -> Tensors:
    with sync.open(case.checkpoint(), device=case.device, budget_bytes=8 << 20) as opened, opened.stream() as stream:
        return dict(stream)


@path("read")
def _(case: Case) -> Tensors:
    with sync.open(case.checkpoint(), device=case.device) as opened:
        return {name: opened.read(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping


SLICES: dict[str, Any] = {
    "rows": slice(3, 11),
    "columns": (slice(None), slice(2, 30)),
    "inner columns of a cube": (slice(None), slice(None), slice(1, 6)),
    "middle of a cube": (slice(None), slice(1, 5)),
    "steps": (slice(None, None, 3), slice(None, None, 2)),
    "steps back": (slice(None, None, -1), slice(None, None, -2)),
    "one row": 5,
    "lists": [slice(1, 3), slice(6, 9)],
    "lists of columns": (slice(None), [slice(1, 3), slice(8, 12)]),
}
"""Slices along each kind of dimension."""


def sliced(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Return a part of a tensor of integers, computed by other means than stio's."""
    found = tensor
    for dim, one in reversed(list(enumerate(index if isinstance(index, tuple) else (index,)))):
        parts = one if isinstance(one, list) else [one]
        size = found.shape[dim]
        rows = [k for part in parts for k in ([part] if isinstance(part, int) else range(*part.indices(size)))]
        found = torch.from_numpy(np.take(found.numpy(), rows, dim))
        if isinstance(one, int):
            found = found.squeeze(dim)
    return found.contiguous()


def _slices(case: Case, index: Any, name: str) -> tuple[list[str], Tensors]:
    kind = "cube" if "cube" in name else "matrix"
    # Two numbers of F4 are one element of torch: tests of slices have them.
    names = [one for one in case.tensors if one.endswith(f".{kind}") and not one.startswith("F4.")]
    return names, {one: sliced(integers(case.tensors[one]), index).view(case.tensors[one].dtype) for one in names}


for _name, _index in SLICES.items():

    @path(f"read, {_name}")
    def _(case: Case, index: Any = _index, name: str = _name) -> Tensors:
        names, case.expected = _slices(case, index, name)
        with sync.open(case.checkpoint(), device=case.device) as opened:
            return {one: opened.read(one, index) for one in names}

    @path(f"load, slices, {_name}")
    def _(case: Case, index: Any = _index, name: str = _name) -> Tensors:
        names, case.expected = _slices(case, index, name)
        return sync.load(case.checkpoint(), names=names, slices=dict.fromkeys(names, index), device=case.device)


# Modules.


def _state(module: nn.Module) -> Tensors:
    return {name: one.detach() for name, one in module.state_dict().items()}


@path("load_into")
def _(case: Case) -> Tensors:
    module = module_of(case.zeros())
    sync.load_into(module, case.checkpoint())
    return _state(module)


@path("load_into, small budget")
def _(case: Case) -> Tensors:
    module = module_of(case.zeros())
    sync.load_into(module, case.checkpoint(), budget_bytes=300_000)
    return _state(module)


def _turned(memory: torch.Tensor) -> torch.Tensor:
    turn = tuple(reversed(range(memory.dim())))
    return memory.permute(turn).contiguous().permute(turn)


def _spread(memory: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*memory.shape, 3), 0x5A, dtype=memory.dtype, device=memory.device)
    return wide[..., 1]


def _within(memory: torch.Tensor) -> torch.Tensor:
    return torch.cat([memory.flatten()[:1]] * 2 + [memory.flatten()])[2:].view(memory.shape)


for _name, _make in {"turned": _turned, "spread": _spread, "within a larger storage": _within}.items():

    @path(f"load_into, {_name} memory")
    def _(case: Case, make: Callable[[torch.Tensor], torch.Tensor] = _make) -> Tensors:
        module = module_of(case.zeros(make))
        sync.load_into(module, case.checkpoint())
        return _state(module)


@path("load_into, beside memory with gaps")
def _(case: Case) -> Tensors:
    """A tensor with gaps gives its group tensors, which torch copies, instead of one tensor of bytes."""
    memory = case.zeros()
    first = next(iter(memory))
    module = module_of(memory | {first: _spread(memory[first])})
    sync.load_into(module, case.checkpoint())
    return _state(module)


@path("load_into, parameters")
def _(case: Case) -> Tensors:
    module, memory = module_of({}), case.zeros()
    for name, one in memory.items():
        owner = module_at(module, name)
        grad = one.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
        owner.register_parameter(name.split(".")[1], nn.Parameter(one, requires_grad=grad))
    sync.load_into(module, case.checkpoint())
    return _state(module)


def module_at(module: nn.Module, name: str) -> nn.Module:
    """Return the child that has the tensors of a dtype; make it if it is not there."""
    dtype = name.split(".")[0]
    if dtype not in module._modules:
        module._modules[dtype] = nn.Module()
    child = module._modules[dtype]
    assert child is not None
    return child


@path("load_into, assign")
def _(case: Case) -> Tensors:
    with torch.device("meta"):
        module = module_of({name: torch.empty_like(one) for name, one in case.tensors.items()})
    sync.load_into(module, case.checkpoint(), assign=True, device=case.device)
    return _state(module)


@path("load_into, hooks", by_torch=True)
def _(case: Case) -> Tensors:
    module = module_of(case.zeros())
    module.register_load_state_dict_post_hook(lambda *_: None)
    sync.load_into(module, case.checkpoint())
    return _state(module)


@path("load_into, open")
def _(case: Case) -> Tensors:
    module = module_of(case.zeros())
    with sync.open(case.checkpoint()) as opened:
        opened.load_into(module)
    return _state(module)


@path("load_into, under compile")
def _(case: Case) -> Tensors:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            floats = [one for one in self.buffers() if one.dtype in (torch.bfloat16, torch.float16, torch.float32)]
            return x + sum(one.float().sum() for one in floats[:1])

    module = Sum()
    for name, one in module_of(case.zeros()).named_children():
        module.add_module(name, one)
    compiled = torch.compile(module, backend="eager")
    compiled(torch.zeros(3, device=case.device))
    sync.load_into(module, case.checkpoint())
    compiled(torch.zeros(3, device=case.device))
    return _state(module)


@path("warm_start")
def _(case: Case) -> Tensors:
    module = module_of({})
    for name, one in case.tensors.items():
        grad = one.is_floating_point() and one.itemsize > 1
        empty = torch.empty_like(one, device="meta")
        module_at(module, name).register_parameter(name.split(".")[1], nn.Parameter(empty, requires_grad=grad))
    with sync.warm_start(module, case.checkpoint(), device=case.device) as warm:
        warm.done()
    return _state(module)


@path("warm_start, buffers that are there")
def _(case: Case) -> Tensors:
    module = module_of(case.zeros())
    with sync.warm_start(module, case.checkpoint(), device=case.device) as warm:
        warm.done()
    return _state(module)


@path("warm_start, two parameters of one tensor")
def _(case: Case) -> Tensors:
    names = [name for name in case.tensors if name.endswith(".matrix")]
    case.expected = {f"{side}.{name}": case.tensors[name] for side in "ab" for name in names}
    file = write_checkpoint(case.folder / "tied", {name: case.tensors[name] for name in names})
    with sync.open(file) as opened:
        given = {name: opened.read(name) for name in names}
    shared = case.folder / "shared.safetensors"
    sync.save({f"{side}.{name}": given[name] for side in "ab" for name in names}, shared)
    module = nn.Module()
    for side in "ab":
        child = nn.Module()
        for name in names:
            empty = torch.empty_like(case.tensors[name], device="meta")
            grad = empty.is_floating_point() and empty.itemsize > 1
            module_at(child, name).register_parameter("matrix", nn.Parameter(empty, requires_grad=grad))
        module.add_module(side, child)
    with sync.warm_start(module, shared, device=case.device) as warm:
        warm.done()
    return _state(module)


class Subclass(nn.Parameter):
    """A parameter without code of its own for torch's functions, as users and vLLM have them."""


class Wrapped(torch.Tensor):
    """A tensor whose functions are overridden."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@path("load_into, subclasses")
def _(case: Case) -> Tensors:
    module = module_of({})
    for name, one in case.zeros().items():
        parameter = nn.Parameter(one, requires_grad=False)
        if name.endswith((".matrix", ".scalar")):
            parameter.__class__ = Subclass
        module_at(module, name).register_parameter(name.split(".")[1], parameter)
    sync.load_into(module, case.checkpoint())
    return _state(module)


@path("load_into, one subclass that overrides functions", by_torch=True)
def _(case: Case) -> Tensors:
    module = module_of({name: one.as_subclass(Wrapped) for name, one in case.zeros().items()})
    sync.load_into(module, case.checkpoint())
    return {name: one.as_subclass(torch.Tensor) for name, one in _state(module).items()}


@path("load_into, targets of other dtypes beside")
def _(case: Case) -> Tensors:
    """Casts from one dtype to two, in a list with copies: they go to no kernel that takes them for one dtype."""
    source = {f"C.{k}": torch.arange(9.0) for k in range(3)} | case.tensors
    module = module_of(case.zeros())
    module._modules["C"] = others = nn.Module()
    for k, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16]):
        others.register_buffer(str(k), torch.zeros(9, dtype=dtype, device=case.device))
    sync.load_into(module, write_checkpoint(case.folder / "with casts", source))
    found = _state(module)
    for k in range(3):
        assert found.pop(f"C.{k}").tolist() == torch.arange(9.0).tolist()
    return found


@path("load_into, in and out of inference mode")
def _(case: Case) -> Tensors:
    source = case.checkpoint()
    with torch.inference_mode():
        first = module_of(case.zeros())
        sync.load_into(first, source)
        require_same_bits(_state(first), case.expected)
    module = module_of(case.zeros())
    sync.load_into(module, source)
    sync.save(module, case.folder / "out")
    require_same_bits(read_files(case.folder / "out"), case.expected)
    return _state(module)


@path("warm_start, buffers that the file does not have")
def _(case: Case) -> Tensors:
    names = [name for name in case.tensors if name.endswith(".matrix")]
    case.expected = {name: case.tensors[name] for name in names}
    module = nn.Module()
    for name in names:
        kept = _spread(torch.full_like(integers(case.tensors[name]), 0)).copy_(integers(case.tensors[name]))
        owner = module_at(module, name)
        owner.register_buffer("matrix", kept.view(case.tensors[name].dtype), persistent=False)
    module.register_parameter("weight", nn.Parameter(torch.empty(3, device="meta")))
    file = write_checkpoint(case.folder / "other", {"weight": torch.ones(3)})
    with sync.warm_start(module, file, device=case.device) as warm:
        warm.done()
    return {name: one.detach() for name, one in module.named_buffers()}


# Caches.


@path("HostCache")
def _(case: Case) -> Tensors:
    source, keywords = case.checkpoint(), {} if case.device == "cpu" else {"device": case.device}
    cache = case.stack.enter_context(stio.HostCache(256 << 20, **keywords))
    sync.load(source, device=case.device, cache=cache)
    return sync.load(source, device=case.device, cache=cache)


@path("HostCache, load_into")
def _(case: Case) -> Tensors:
    source, keywords = case.checkpoint(), {} if case.device == "cpu" else {"device": case.device}
    cache = case.stack.enter_context(stio.HostCache(256 << 20, **keywords))
    module = module_of(case.zeros())
    for _ in range(2):
        sync.load_into(module, source, cache=cache)
    return _state(module)


@path("DiskCache")
def _(case: Case) -> Tensors:
    server = case.stack.enter_context(http_server())
    server.put("/m.safetensors", case.file().read_bytes())
    cache = stio.DiskCache(case.folder / "cache", max_bytes=1 << 30)
    for _ in range(2):
        found = sync.load(f"{server.url}/m.safetensors", device=case.device, cache=cache)
    return found


@path("load, from a server")
def _(case: Case) -> Tensors:
    server = case.stack.enter_context(http_server())
    server.put("/m.safetensors", case.file().read_bytes())
    return sync.load(f"{server.url}/m.safetensors", device=case.device)


# Saves.


@path("save")
def _(case: Case) -> Tensors:
    sync.save(case.there(), case.folder / "out", max_shard_size="8MB")
    return read_files(case.folder / "out")


@path("save, one file, small budget")
def _(case: Case) -> Tensors:
    sync.save(case.there(), case.folder / "out.safetensors", budget_bytes=300_000)
    return read_files(case.folder / "out.safetensors")


@path("save, module")
def _(case: Case) -> Tensors:
    sync.save(module_of(case.there()), case.folder / "out")
    return read_files(case.folder / "out")


for _name, _make in {"turned": _turned, "spread": _spread, "within a larger storage": _within}.items():

    @path(f"save, {_name} memory")
    def _(case: Case, make: Callable[[torch.Tensor], torch.Tensor] = _make) -> Tensors:
        given = {}
        for name, one in case.there().items():
            memory = make(integers(one))
            memory.copy_(integers(one))
            given[name] = memory.view(one.dtype)
        sync.save(given, case.folder / "out")
        return read_files(case.folder / "out")


@path("save, lazy tensors")
def _(case: Case) -> Tensors:
    there = case.there()
    lazy = {name: stio.LazyTensor(one.dtype, tuple(one.shape), lambda one=one: one) for name, one in there.items()}
    sync.save(lazy, case.folder / "out")
    return read_files(case.folder / "out")


@path("Saver")
def _(case: Case) -> Tensors:
    there = case.there()
    with sync.Saver() as saver:
        for k in range(2):
            pending = saver.save(there, case.folder / f"step-{k}")
            pending.result()
    return read_files(case.folder / "step-1")


@path("save_state, load_state")
def _(case: Case) -> Tensors:
    sync.save_state({"model": case.there(), "step": 3}, case.folder / "state.safetensors")
    found: Tensors = sync.load_state(case.folder / "state.safetensors", device=case.device)["model"]
    return found


# Torch's distributed checkpoint, on one process.


@path("DCP, reader")
def _(case: Case) -> Tensors:
    state = case.zeros()
    dcp.load(state, storage_reader=StioStorageReader(case.checkpoint()), no_dist=True)
    return state


@path("DCP, reader into turned memory")
def _(case: Case) -> Tensors:
    state = case.zeros(_turned)
    dcp.load(state, storage_reader=StioStorageReader(case.checkpoint()), no_dist=True)
    return state


@path("DCP, writer")
def _(case: Case) -> Tensors:
    dcp.save(case.there(), storage_writer=StioStorageWriter(case.folder / "out"), no_dist=True)
    return read_files(case.folder / "out")


@path("DCP, stager")
def _(case: Case) -> Tensors:
    stager = StioStager()
    case.stack.callback(stager.close)
    found: Tensors = stager.stage(case.there())
    return {name: one.clone() if one.dtype == torch.float32 else one for name, one in found.items()}


# The drop-ins.


@path("drop-in, load_file")
def _(case: Case) -> Tensors:
    return drop_in.load_file(case.file(), device=case.device)


@path("drop-in, safe_open")
def _(case: Case) -> Tensors:
    with safe_open(case.file(), "pt", device=case.device) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping


@path("drop-in, get_slice")
def _(case: Case) -> Tensors:
    index = (slice(None, None, 2), slice(3, 17))
    names, case.expected = _slices(case, index, "matrix")
    with safe_open(case.file(), "pt", device=case.device) as opened:
        return {name: opened.get_slice(name)[index] for name in names}


@path("drop-in, prefetch")
def _(case: Case) -> Tensors:
    with safe_open(case.file(), "pt", device=case.device) as opened, opened.prefetch() as loader:
        return dict(loader)


@path("drop-in, prefetch of a part")
def _(case: Case) -> Tensors:
    names = [name for name in case.tensors if name.endswith((".vector", ".large"))]
    case.expected = {name: case.tensors[name] for name in names}
    with safe_open(case.file(), "pt") as opened, opened.prefetch(dict.fromkeys(names), device=case.device) as loader:
        return {name: loader.take(name) for name in reversed(names)}


@path("drop-in, save_file")
def _(case: Case) -> Tensors:
    drop_in.save_file(case.there(), case.folder / "out.safetensors")
    return read_files(case.folder / "out.safetensors")


@path("drop-in, save and load of bytes")
def _(case: Case) -> Tensors:
    return drop_in.load(drop_in.save(case.there()))


@path("drop-in, save_model of turned memory")
def _(case: Case) -> Tensors:
    given = {}
    for name, one in case.there().items():
        memory = _turned(integers(one))
        memory.copy_(integers(one))
        given[name] = memory.view(one.dtype)
    drop_in.save_model(module_of(given), str(case.folder / "out.safetensors"))
    return read_files(case.folder / "out.safetensors")


@path("drop-in, load_model", by_torch=True)
def _(case: Case) -> Tensors:
    module = module_of(case.zeros())
    drop_in.load_model(module, case.file())
    return _state(module)


@path("hub, save_torch_model")
def _(case: Case) -> Tensors:
    (case.folder / "out").mkdir()
    hub.save_torch_model(module_of(case.there()), case.folder / "out", max_shard_size="8MB")
    return read_files(case.folder / "out")


@path("hub, load_torch_model", by_torch=True)
def _(case: Case) -> Tensors:
    module = module_of(case.zeros())
    hub.load_torch_model(module, case.checkpoint())
    return _state(module)


@path("hub, load_state_dict_from_file")
def _(case: Case) -> Tensors:
    found = hub.load_state_dict_from_file(case.file(), map_location=str(case.device))
    assert isinstance(found, dict)
    return found


@path("OLMo", cpu_only=True)
def _(case: Case) -> Tensors:
    file = case.folder / "olmo.safetensors"
    olmo.state_dict_to_safetensors_file(case.there(), file)
    found: Tensors = olmo.safetensors_file_to_state_dict(file)
    return found


# Conversions.


@path("convert, from torch.save", cpu_only=True)
def _(case: Case) -> Tensors:
    torch.save(case.tensors, case.folder / "weights.pt")
    sync.convert(case.folder / "weights.pt", case.folder / "out")
    return read_files(case.folder / "out")


@path("convert, other shards", cpu_only=True)
def _(case: Case) -> Tensors:
    sync.convert(case.checkpoint(), case.folder / "out", max_shard_size="3MB")
    return read_files(case.folder / "out")


def of_dtype(dtype: str) -> Tensors:
    """Return the tensors of one dtype."""
    return {name: one for name, one in tensors().items() if name.startswith(f"{dtype}.")}


@path("convert, each dtype to itself", cpu_only=True)
def _(case: Case) -> Tensors:
    given = {name: one for name, one in case.tensors.items() if not name.startswith("F4.")}  # which has no casts
    sync.convert(write_checkpoint(case.folder / "given", given), case.folder / "out", dtype="BF16")
    found = {name: one for name, one in read_files(case.folder / "out").items() if name.startswith("BF16.")}
    case.expected = {name: one for name, one in case.tensors.items() if name in found}
    return found


@path("drop-in, numpy", cpu_only=True)
def _(case: Case) -> Tensors:
    """Of the dtypes that numpy has, into and out of arrays; strided ones too."""
    names = [name for name in case.tensors if not name.startswith(("F4.", "F8", "BF16."))]
    case.expected = {name: case.tensors[name] for name in names}
    arrays = {}
    for name in names:
        bits, dtype = integers(case.tensors[name]).numpy(), case.tensors[name].numpy().dtype
        arrays[name] = np.stack([bits, bits], -1)[..., 1].view(dtype) if bits.ndim else bits.view(dtype)
    numpy_drop_in.save_file(arrays, case.folder / "out.safetensors")
    require_same_bits(read_files(case.folder / "out.safetensors"), case.expected)
    found = numpy_drop_in.load_file(case.folder / "out.safetensors")
    return {
        name: torch.from_numpy(array.view(f"u{array.itemsize}")).view(case.tensors[name].dtype)
        for name, array in found.items()
    }


# New paths come last: the dtypes that a quick run tries of a path go by its place.


for _name, _make in {"": torch.clone, ", turned": _turned, ", spread": _spread}.items():

    @path(f"follow, a delta{_name}")
    def _(case: Case, make: Callable[[torch.Tensor], torch.Tensor] = _make) -> Tensors:
        """Elements are copied into memory that holds the version before."""
        before = deltas.next_state(case.tensors, 0.1, torch.Generator().manual_seed(2))
        run, memory = case.folder / "run", case.zeros(make)
        deltas.write_chain(run, [before])
        with sync.follow(memory, run) as updates:
            deltas.write_delta(run / "step-1", before, case.tensors, base="step-0", step=1)
            version = updates.apply()
        assert version is not None and version.kind == "delta"
        return memory


def run(name: str, case: Case) -> None:
    """Run a path, and compare what arrives.

    Raises:
        AssertionError: A bit has changed.
    """
    found = PATHS[name](case)
    if str(case.device) != "cpu":
        torch.accelerator.synchronize()
    if name in BY_TORCH:
        found = {one: tensor for one, tensor in found.items() if tensor.dtype != torch.bool}
        case.expected = {one: tensor for one, tensor in case.expected.items() if tensor.dtype != torch.bool}
    require_same_bits(found, case.expected)


def names_for(device_is_cpu: bool) -> Sequence[str]:
    """Return the paths that end on the CPU, or on a device."""
    return [name for name in PATHS if device_is_cpu or name not in ON_CPU_ONLY]


def write_delta(folder: Path) -> Path:
    """Write a delta on a delta with all tensors; return its directory."""
    chance = torch.Generator().manual_seed(1)
    before = deltas.next_state(tensors(), 0.03, chance)
    return deltas.write_chain(folder, [deltas.next_state(before, 0.1, chance), before, tensors()])[-1]


def names_for_deltas(device_is_cpu: bool) -> Sequence[str]:
    """Return the paths that load a checkpoint, which may be a delta."""
    loads = [name for name in names_for(device_is_cpu) if "checkpoint" in PATHS[name].__code__.co_names]
    return [name for name in loads if not name.startswith("DCP")]


def describe_size() -> Iterator[str]:
    """Yield lines that say how large the table is."""
    count = {dtype: len(patterns(dtype)) for dtype in DTYPES}
    yield f"{len(PATHS)} paths, {len(DTYPES)} dtypes, {sum(count.values())} bit patterns: {len(PATHS) * sum(count.values())}"


if __name__ == "__main__":
    print("\n".join(describe_size()))
