"""Random targets for everything that fills memory of a caller: right values, or an error of a documented type.

    python -m faults.memory_fuzz DIRECTORY [--seed 1] [--rounds 100] [--seconds 60]

Each round makes a module or a state of a few tensors: freed, shrunk, shared, expanded, overlapping, on meta, read-only,
of subclasses, and ordinary ones. It is given to one call that fills it, or that saves it. If all tensors can be filled,
they must have the values of the checkpoint after that. If one cannot, the call must raise, and the others must be as
they were. With the library of `guarded_memory` in LD_PRELOAD, an access outside of a storage ends the process. The last
line of the output then names the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults.guarded_memory import READ, guarded, num_guarded
from support import bits_of
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import stio
import stio.compat.safetensors.torch as safetensors_torch
from stio import sync
from stio.compat import huggingface_hub
from stio.compat.safetensors import SafetensorError
from stio.device import copy_in
from stio.device import tensors as device_tensors
from stio.device.copy_out import Readiness
from stio.loading.targets.base import PartsTarget
from stio.loading.targets.module import ModuleTarget
from stio.loading.targets.nested import StateTarget

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@dataclass
class Made:
    """A tensor of a target."""

    tensor: torch.Tensor
    can_be_filled: bool = True
    has_data: bool = True
    """Whether a save can read it."""
    is_plain: bool = True
    """Whether torch itself treats it as this project does; if not, the drop-ins may raise torch's own error."""
    is_whole: bool = True
    """Whether it covers its storage; `load_model` and `save_model` of safetensors refuse what does not."""
    shrink: Callable[[], object] | None = None
    """Frees or shrinks its memory."""


class Subclass(torch.Tensor):
    """A subclass that overrides nothing."""


class Counting(torch.Tensor):
    """A subclass through which all functions of torch go."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@dataclass
class Maker:
    """Makes random tensors.

    Args:
        numbers: The source of all randomness.
        directory: For mapped files.
    """

    numbers: random.Random
    directory: Path
    num_files: int = 0

    def shape(self) -> tuple[int, int]:
        return self.numbers.choice([(8, 8), (16, 33), (64, 64), (7, 129), (256, 512), (1, 300)])

    def plain(self) -> torch.Tensor:
        return torch.zeros(self.shape(), dtype=self.numbers.choice(DTYPES))

    def ordinary(self) -> Made:
        tensor = self.plain()
        smaller = self.numbers.choice([0, tensor.nbytes - 1, tensor.nbytes // 2])
        return Made(tensor, shrink=lambda: tensor.untyped_storage().resize_(smaller))

    def freed(self) -> Made:
        tensor = self.plain()
        tensor.untyped_storage().resize_(0)
        return Made(tensor, can_be_filled=False, has_data=False)

    def shrunk(self) -> Made:
        tensor = self.plain()
        tensor.untyped_storage().resize_(self.numbers.choice([1, tensor.nbytes // 2, tensor.nbytes - 1]))
        return Made(tensor, can_be_filled=False, has_data=False)

    def resized_twice(self) -> Made:
        tensor = self.plain()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(tensor.nbytes + self.numbers.choice([0, 1, 4096]))
        tensor.zero_()
        return Made(tensor, is_whole=tensor.nbytes == tensor.untyped_storage().nbytes())

    def shrunk_view(self) -> Made:
        whole = self.plain()
        view = whole[whole.shape[0] // 2 :]
        whole.untyped_storage().resize_(whole.nbytes - self.numbers.choice([1, view.nbytes // 2]))
        return Made(view, can_be_filled=False, has_data=False)

    def kept_view(self) -> Made:
        whole = torch.zeros(64, 64)
        view = whole[:16]
        whole.untyped_storage().resize_(view.nbytes)
        return Made(view)

    def shrunk_columns(self) -> Made:
        tensor = torch.zeros(64, 64).t()[1:]
        tensor.untyped_storage().resize_(self.numbers.choice([0, 64 * 64 * 4 - 1, 64 * 64 * 2]))
        return Made(tensor, can_be_filled=False, has_data=False)

    def strided(self) -> Made:
        return Made(self.numbers.choice([torch.zeros(40, 30).t(), torch.zeros(64, 64)[::2, 1::3]]), is_whole=False)

    def expanded(self) -> Made:
        return Made(torch.zeros(8, 1).expand(8, 32), can_be_filled=False, is_plain=False)

    def overlapping_itself(self) -> Made:
        return Made(torch.zeros(300).as_strided((40, 40), (3, 1)), can_be_filled=False, is_plain=False)

    def on_meta(self) -> Made:
        return Made(torch.zeros(8, 8, device="meta"), can_be_filled=False, has_data=False, is_plain=False)

    def sparse(self) -> Made:
        return Made(torch.eye(8).to_sparse(), can_be_filled=False, has_data=False, is_plain=False)

    def of_inference(self) -> Made:
        with torch.inference_mode():
            return Made(torch.zeros(8, 8), can_be_filled=False, is_plain=False)

    def read_only_file(self) -> Made:
        self.num_files += 1
        path = self.directory / f"mapped-{self.num_files}"
        np.zeros((64, 64), np.float32).tofile(path)
        mapped = np.memmap(path, mode=self.numbers.choice(["r", "c"]), dtype=np.float32, shape=(64, 64))
        return Made(torch.from_numpy(mapped), can_be_filled=mapped.mode == "c")

    def file_of_torch(self) -> Made:
        self.num_files += 1
        path = self.directory / f"mapped-{self.num_files}"
        np.zeros(4096, np.float32).tofile(path)
        return Made(torch.from_file(str(path), shared=self.numbers.random() < 0.5, size=4096))

    def guarded(self) -> Made:
        return Made(guarded(self.numbers.choice(DTYPES), self.shape()))

    def guarded_read_only(self) -> Made:
        return Made(guarded(torch.float32, self.shape(), READ), can_be_filled=False)

    def in_shared_memory(self) -> Made:
        return Made(torch.zeros(64, 64).share_memory_())

    def of_a_subclass(self) -> Made:
        kind = self.numbers.choice([Subclass, Counting])
        made = self.numbers.choice([self.ordinary, self.ordinary, self.freed, self.shrunk])()
        made.tensor = made.tensor.as_subclass(kind)
        return made

    def empty(self) -> Made:
        tensor = torch.zeros(0, 7)
        if self.numbers.random() < 0.5:
            tensor = torch.zeros(40)[:0]
            tensor.untyped_storage().resize_(0)
        return Made(tensor)

    def scalar(self) -> Made:
        return Made(torch.tensor(0.0))

    def target(self) -> dict[str, Made]:
        """Return a few tensors by name, of good kinds alone, or of any."""
        kinds = [
            self.numbers.choice(ANY if self.numbers.random() < 0.5 else GOOD)
            for _ in range(self.numbers.randrange(1, 7))
        ]
        return {f"part{k % 2}.{k}{kind}": getattr(self, kind)() for k, kind in enumerate(kinds)}

    def share(self, made: dict[str, Made], *, overlaps: bool = True) -> dict[str, tuple[str, int]]:
        """Add names of memory that others have too; return for each the other name, and the first row that it has.

        Args:
            made: Changed.
            overlaps: Whether some of them have a part of the rows.
        """
        found = {}
        for name, one in list(made.items()):
            tensor = one.tensor
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or self.numbers.random() < 0.8:
                continue
            has_rows = one.has_data and one.is_plain and tensor.dim() > 0 and len(tensor) > 1
            first = self.numbers.choice([0, 0, 1]) if has_rows and overlaps else 0
            made[f"{name}_shared"] = replace(one, tensor=tensor[first:] if first else tensor, is_whole=False)
            one.is_whole = False
            found[f"{name}_shared"] = name, first
        return found


GOOD = (
    "ordinary",
    "ordinary",
    "strided",
    "kept_view",
    "resized_twice",
    "guarded",
    "in_shared_memory",
    "empty",
    "scalar",
)
ANY = (*GOOD, "freed", "freed", "shrunk", "shrunk", "shrunk_view", "shrunk_columns", "expanded", "overlapping_itself",
       "on_meta", "sparse", "of_inference", "read_only_file", "file_of_torch", "guarded_read_only", "of_a_subclass")  # fmt: skip


def values_for(tensor: torch.Tensor, numbers: random.Random) -> torch.Tensor:
    """Return a tensor for the checkpoint that a target of this kind gets."""
    dtype = tensor.dtype
    if dtype == torch.float32 and numbers.random() < 0.2:
        dtype = torch.float64
    generator = torch.Generator().manual_seed(numbers.randrange(1 << 30))
    return torch.randint(0, 2 if dtype == torch.bool else 100, tuple(tensor.shape), generator=generator).to(dtype)


def holder(made: dict[str, Made], numbers: random.Random) -> nn.Module:
    """Return a module with these tensors, as parameters and buffers of submodules."""
    module = nn.Module()
    for name, one in made.items():
        prefix, _, leaf = name.rpartition(".")
        if prefix not in module._modules:
            module.add_module(prefix, nn.Module())
        part = module._modules[prefix]
        assert part is not None
        if type(one.tensor) is torch.Tensor and numbers.random() < 0.5:
            part.register_parameter(leaf, nn.Parameter(one.tensor, requires_grad=False))
        else:
            part.register_buffer(leaf, one.tensor)
    return module


# What fills.


Fill = Callable[["Round"], object]


@dataclass
class Round:
    """One target, its checkpoint, and what is done."""

    numbers: random.Random
    directory: Path
    made: dict[str, Made]
    expected: Tensors
    module: nn.Module

    @property
    def file(self) -> Path:
        return self.directory / "model.safetensors"

    def memory(self) -> str:
        return self.numbers.choice(["auto", "map", "lazy", "copy"])

    @property
    def tensors(self) -> Tensors:
        return {name: one.tensor for name, one in self.made.items()}


@contextmanager
def _own_error() -> Iterator[None]:
    """Raise the error in an exception of torch's distributed checkpoint, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise error.failures[0][0] from None


def load_into(a: Round) -> None:
    sync.load_into(a.module, a.file, memory=a.memory(), budget_bytes=a.numbers.choice([None, 1 << 16]))


def load_by_open(a: Round) -> None:
    with sync.open(a.file, memory=a.memory()) as checkpoint:
        checkpoint.load_into(a.module)


def load_by_cache(a: Round) -> None:
    with sync.HostCache(64 << 20, device="cpu") as cache:
        for _ in range(2):
            sync.load_into(a.module, a.file, cache=cache)


def load_with_a_hook(a: Round) -> None:
    part = a.numbers.choice([a.module, next(a.module.children())])
    part.register_load_state_dict_post_hook(lambda *_: None)
    sync.load_into(a.module, a.file)


def load_ranks(a: Round) -> None:
    sync.distributed.load_into(a.module, a.file, memory=a.memory())


def load_broadcast(a: Round) -> None:
    sync.distributed.load_into(a.module, a.file, broadcast=True)


def load_mapping(a: Round) -> None:
    sync.distributed.load_into(a.tensors, a.file)


def load_dcp(a: Round) -> None:
    with _own_error():
        dcp.load(a.tensors, storage_reader=stio.distributed.StioStorageReader(a.file))


def warm_start(a: Round) -> None:
    with sync.warm_start(a.module, a.file) as warm:
        warm.done()


def load_model(a: Round) -> None:
    safetensors_torch.load_model(a.module, a.file)


def load_torch_model(a: Round) -> None:
    huggingface_hub.load_torch_model(a.module, a.file)


FILLS: tuple[Fill, ...] = (
    load_into, load_by_open, load_by_cache, load_with_a_hook, load_ranks, load_broadcast, load_mapping, load_dcp,
    warm_start, load_model, load_torch_model,
)  # fmt: skip
OF_STATES = (load_mapping, load_dcp)
OF_TORCH = (load_model, load_torch_model)
"""torch itself fills here: what it refuses, and what it does not, is its own choice, but for memory."""


# What reads.


def save(a: Round) -> Path:
    sync.save(a.tensors, a.directory / "saved.safetensors")
    return a.directory / "saved.safetensors"


def saver(a: Round) -> Path:
    with sync.Saver() as it:
        it.save(a.tensors, a.directory / "saved.safetensors").result()
    return a.directory / "saved.safetensors"


def save_state(a: Round) -> Path:
    sync.save_state({"state": a.tensors}, a.directory / "saved.safetensors")
    return a.directory / "saved.safetensors"


def save_file(a: Round) -> Path:
    safetensors_torch.save_file(a.tensors, a.directory / "saved.safetensors")
    return a.directory / "saved.safetensors"


def save_bytes(a: Round) -> Path:
    (a.directory / "saved.safetensors").write_bytes(safetensors_torch.save(a.tensors))
    return a.directory / "saved.safetensors"


def save_model(a: Round) -> Path:
    safetensors_torch.save_model(a.module, a.directory / "saved.safetensors")
    return a.directory / "saved.safetensors"


def save_torch_model(a: Round) -> Path:
    huggingface_hub.save_torch_state_dict(a.tensors, a.directory, filename_pattern="saved{suffix}.safetensors")
    return a.directory / "saved.safetensors"


def save_dcp(a: Round) -> Path:
    with _own_error():
        dcp.save(a.tensors, storage_writer=stio.distributed.StioStorageWriter(a.directory / "saved.safetensors"))
    return a.directory / "saved.safetensors"


def stage_dcp(a: Round) -> Path:
    staged = stio.distributed.StioStager().stage(a.tensors)
    sync.save(staged, a.directory / "saved.safetensors")
    return a.directory / "saved.safetensors"


SAVES: tuple[Callable[[Round], Path], ...] = (
    save, saver, save_state, save_file, save_bytes, save_model, save_torch_model, save_dcp, stage_dcp,
)  # fmt: skip

TYPED = (stio.StioError, SafetensorError, ValueError, TypeError)
"""What a save raises for a wrong call is a ValueError or a TypeError; of a load it is a `StioError`."""


class Finding(Exception):
    """A round was not as it must be."""


def must_be_refused(fill: Fill, one: Made) -> bool:
    if not one.is_plain and (fill in OF_TORCH or (fill is load_dcp and one.tensor.is_meta)):
        return False  # torch makes memory for what is on meta before a reader of its checkpoints is called
    return not one.can_be_filled


def fill_once(maker: Maker, fill: Fill) -> str:
    """Fill a random target by a call; return what came of it."""
    numbers = maker.numbers
    made = maker.target()
    if fill is warm_start:  # it fills parameters on meta, and what has memory are buffers
        made = {name: one for name, one in made.items() if not one.tensor.is_meta}
    expected = {name: values_for(one.tensor, numbers) for name, one in made.items()}
    for name, (other, first) in maker.share(made, overlaps=fill not in (load_ranks, load_broadcast)).items():
        expected[name] = expected[other][first:] if first else expected[other]
    module = holder(made, numbers if fill is not warm_start else random.Random(0))
    if fill is warm_start:
        module = nn.Module()
        for name, one in made.items():
            module.register_buffer(name.replace(".", "_"), one.tensor)
        expected = {name.replace(".", "_"): value for name, value in expected.items()}
        made = {name.replace(".", "_"): one for name, one in made.items()}
    if fill in OF_STATES or fill is load_ranks or fill is load_broadcast:
        _shard(made, expected, module, numbers)
    names = ", ".join(made)
    a = Round(numbers, maker.directory, made, expected, module)
    sync.save({name: value.clone() for name, value in expected.items()}, a.file)
    refused = [name for name, one in made.items() if must_be_refused(fill, one)]
    before = {name: _bits(one.tensor) for name, one in made.items() if one.has_data}
    try:
        fill(a)
    except Exception as error:  # noqa: BLE001 - which one it may be is decided here
        if not _is_typed(fill, error):
            raise Finding(f"{fill.__name__}({names}): raised {type(error).__name__}: {error}") from error
        if not refused and all(one.is_plain and (one.is_whole or fill is not load_model) for one in made.values()):
            raise Finding(f"{fill.__name__}({names}): refused, and can be filled: {error}") from error
        if refused:
            for name, bits in before.items():
                if _bits(made[name].tensor) != bits:
                    raise Finding(f"{fill.__name__}({names}): was refused, and has filled {name}") from error
        return "refused"
    if refused:
        raise Finding(f"{fill.__name__}({names}): has filled what cannot be filled: {refused}")
    for name, one in made.items():
        if one.is_plain:
            _require_equal(f"{fill.__name__}({names}): {name}", one.tensor, expected[name])
    return "filled"


def _is_typed(fill: Fill, error: Exception) -> bool:
    if fill in OF_TORCH:
        return isinstance(error, stio.StioError | SafetensorError | RuntimeError)
    return isinstance(error, stio.StioError)


def _shard(made: dict[str, Made], expected: Tensors, module: nn.Module, numbers: random.Random) -> None:
    """Make DTensors of some ordinary tensors; of one of them the local memory may be freed."""
    mesh = DeviceMesh("cpu", [0])
    for name, one in list(made.items()):
        if (
            one.shrink is None
            or not one.can_be_filled
            or type(one.tensor) is not torch.Tensor
            or numbers.random() < 0.5
        ):
            continue
        sharded = distribute_tensor(torch.zeros_like(one.tensor), mesh, [Shard(0)])
        local = sharded.to_local()
        new = made[name] = Made(sharded)
        if numbers.random() < 0.3:
            local.untyped_storage().resize_(numbers.choice([0, local.nbytes - 1]))
            new.can_be_filled = new.has_data = False
        prefix, _, leaf = name.rpartition(".")
        part = module.get_submodule(prefix)
        part._parameters.pop(leaf, None)
        part._buffers.pop(leaf, None)
        part.register_buffer(leaf, sharded)


def _bits(tensor: torch.Tensor) -> bytes:
    with torch.no_grad():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return bytes(bits_of(local.detach().as_subclass(torch.Tensor).contiguous()))


def _require_equal(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if _bits(found) != _bits(expected.to(found.dtype)):
        raise Finding(f"{what} has other values than the checkpoint")


def save_once(maker: Maker, call: Callable[[Round], Path]) -> str:
    """Save random tensors by a call; return what came of it."""
    numbers = maker.numbers
    made = maker.target()
    maker.share(made)
    names = ", ".join(made)
    for one in made.values():
        if one.has_data and one.can_be_filled:
            with torch.no_grad():
                one.tensor.copy_(values_for(one.tensor, numbers))
    a = Round(numbers, maker.directory, made, {}, holder(made, numbers))
    expected = {name: one.tensor.detach().clone() for name, one in made.items() if one.has_data}
    refused = [name for name, one in made.items() if not one.has_data]
    with suppress(FileNotFoundError):
        (maker.directory / "saved.safetensors").unlink()
    try:
        path = call(a)
    except Exception as error:  # noqa: BLE001 - which one it may be is decided here
        of_torch = call in (save_file, save_bytes, save_model, save_torch_model) and isinstance(error, RuntimeError)
        if not isinstance(error, TYPED) and not of_torch:
            raise Finding(f"{call.__name__}({names}): raised {type(error).__name__}: {error}") from error
        if (maker.directory / "saved.safetensors").exists():
            raise Finding(f"{call.__name__}({names}): was refused, and has written a file") from error
        return "refused"
    if refused:
        raise Finding(f"{call.__name__}({names}): has saved what has no data: {refused}")
    loaded = sync.load_state(path)["state"] if call is save_state else sync.load(path, memory="copy")
    for name, tensor in expected.items():
        key = next((key for key in loaded if key.endswith(name)), "")
        if not key and call in (save_model, save_torch_model) and f"{name.removesuffix('_shared')}_shared" in made:
            continue  # of names that share memory these write one
        if not key:
            raise Finding(f"{call.__name__}({names}): {name} is not in the file: {list(loaded)}")
        _require_equal(f"{call.__name__}({names}): {name}", loaded[key], tensor)
    return "saved"


# Memory that goes between the check and the copy.


def shrink_meanwhile(maker: Maker, fill: Fill | None) -> str:
    """Free or shrink memory just before each copy of a load, or before the snapshot of a save if `fill` is None."""
    numbers = maker.numbers
    made = {f"part0.{k}": maker.ordinary() for k in range(3)}
    chosen = numbers.choice(list(made.values()))
    module = holder(made, numbers)
    a = Round(
        numbers, maker.directory, made, {name: values_for(one.tensor, numbers) for name, one in made.items()}, module
    )
    assert chosen.shrink is not None
    with _before_copies(chosen.shrink):
        try:
            if fill is None:
                save(a)
            else:
                sync.save(a.expected, a.file) if not a.file.exists() else None
                fill(a)
        except TYPED:
            return "refused"
    raise Finding(f"{'save' if fill is None else fill.__name__}: memory went, and nothing was said")


async def _cancelled(a: Round, seconds: float) -> None:
    loading = asyncio.ensure_future(stio.load_into(a.module, a.file, budget_bytes=1 << 16, memory=a.memory()))
    await asyncio.sleep(seconds)
    loading.cancel()
    with suppress(asyncio.CancelledError):
        await loading


def free_after_a_cancel(maker: Maker) -> str:
    """Cancel a load, and free the memory at once: nothing may write to it any more."""
    made = {f"part0.{k}": Made(torch.zeros(256, 512)) for k in range(6)}
    expected = {name: values_for(one.tensor, maker.numbers) for name, one in made.items()}
    a = Round(maker.numbers, maker.directory, made, expected, holder(made, maker.numbers))
    sync.save(expected, a.file)
    asyncio.run(_cancelled(a, maker.numbers.random() * 0.004))
    for one in made.values():
        one.tensor.untyped_storage().resize_(0)
    try:
        load_into(a)
    except stio.MismatchError:
        return "cancelled"
    raise Finding("a module was filled that has no memory after a cancel")


class _before_copies:  # noqa: N801 - a context manager
    """Context in which a function is called before each copy of a load and of a save."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._old: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        for place, name in (
            (ModuleTarget, "copy"), (ModuleTarget, "copy_rows"), (ModuleTarget, "_load_as_torch"),
            (StateTarget, "copy"), (PartsTarget, "copy"), (Readiness, "copy_pieces"), (Readiness, "copy_out"),
        ):  # fmt: skip
            old = getattr(place, name)
            self._old.append((place, name, old))
            setattr(place, name, self._wrapped(old))

    def _wrapped(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **keywords: Any) -> Any:
            self._call()
            return old(*args, **keywords)

        return called

    def __exit__(self, *_: object) -> None:
        for place, name, old in self._old:
            setattr(place, name, old)


MEANWHILE: tuple[Fill | None, ...] = (load_into, load_by_open, load_with_a_hook, load_broadcast, load_mapping, load_dcp)


def one_round(seed: int, directory: Path) -> str:
    """Do all that a seed means; return what was done."""
    numbers = random.Random(seed)
    maker = Maker(numbers, directory)
    call: Any = None
    which = numbers.random()
    if which < 0.55:
        call = FILLS[seed % len(FILLS)]
        what = fill_once(maker, call)
    elif which < 0.9:
        call = SAVES[seed % len(SAVES)]
        what = save_once(maker, call)
    elif which > 0.98:
        what = free_after_a_cancel(maker)
    else:
        call = (*MEANWHILE, None)[seed % (len(MEANWHILE) + 1)]
        (directory / "model.safetensors").unlink(missing_ok=True)
        what = shrink_meanwhile(maker, call)
    for path in directory.glob("mapped-*"):
        path.unlink()
    return f"{getattr(call, '__name__', 'load or save')} {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1 << 40)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--blind", action="store_true", help="without the checks of memory: a control")
    options = parser.parse_args()
    faulthandler.enable()
    if options.blind:
        for checks in (copy_in, device_tensors):
            checks.extent_of = lambda tensor, storage=None: (0, 0, 0, 0)
    options.directory.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    counts: dict[str, int] = {}
    findings: list[str] = []
    end = time.monotonic() + options.seconds
    done = 0
    while done < options.rounds and time.monotonic() < end:
        seed = options.seed * 1_000_000 + done
        print(f"seed {seed}", end="\r", flush=True)
        try:
            what = one_round(seed, options.directory)
            counts[what] = counts.get(what, 0) + 1
        except Finding as finding:
            findings.append(f"seed {seed}: {finding}")
        done += 1
    dist.destroy_process_group()
    for what, count in sorted(counts.items()):
        print(f"{what}: {count}")
    for finding in findings[:20]:
        print(finding)
    print(f"{done:,} rounds, {num_guarded():,} allocations with guards, findings: {len(findings)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
