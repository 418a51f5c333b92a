"""402, 412, 439. Values that the dtype of a target cannot hold: counted in a cast, refused in a state."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerators import gpu
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import stio
from stio import sync
from stio.cli.main import main
from stio.device.base import resolve_device
from stio.device.casts import Lost
from stio.distributed import StioStorageReader
from stio.errors import MismatchError
from stio.loading.api import fill_from
from stio.loading.options import LoadOptions
from stio.loading.targets.nested import StateTarget
from stio.runtime.notifier import run_blocking

BIG = torch.tensor([1.0, 3e38, -3e38, 1e-40, 0.0, torch.inf, torch.nan])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "outside the range" in record.getMessage()]


class Module(nn.Module):
    def __init__(self, dtype: torch.dtype, *, buffers: bool = True, device: str = "cpu") -> None:
        super().__init__()
        for name in ("w", "v"):
            tensor = torch.zeros(7, dtype=dtype, device=device)
            if buffers:
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, nn.Parameter(tensor))


async def streamed(path: Path, dtype: Any) -> None:
    async with stio.open(path, dtype=dtype) as checkpoint, checkpoint.stream() as stream:
        async for _ in stream:
            pass


def warmed(path: Path, dtype: torch.dtype) -> None:
    module = Module(dtype, buffers=False, device="meta")
    module.register_buffer("v", torch.zeros(7, dtype=dtype)) if module._parameters.pop("v") is not None else None
    with sync.warm_start(module, path) as load:
        load.done()


def hooked(path: Path, dtype: torch.dtype) -> None:
    module = Module(dtype)
    module.register_load_state_dict_post_hook(lambda *_: None)
    sync.load_into(module, path)


WAYS: dict[str, Callable[[Path, torch.dtype], Any]] = {
    "load": lambda path, dtype: sync.load(path, dtype=dtype),
    "load by name": lambda path, dtype: sync.load(path, dtype={"w": dtype, "v": dtype}),
    "load to copies": lambda path, dtype: sync.load(path, dtype=dtype, memory="copy"),
    "load of slices": lambda path, dtype: sync.load(path, slices={"w": slice(0, 7, 1)}, dtype=dtype),
    "stream": lambda path, dtype: asyncio.run(streamed(path, dtype)),
    "load_into": lambda path, dtype: sync.load_into(Module(dtype), path),
    "load_into by assignment": lambda path, dtype: sync.load_into(Module(dtype), path, assign=True, dtype=dtype),
    "load_into with hooks": hooked,
    "warm_start": warmed,
    "convert": lambda path, dtype: sync.convert(path, path.parent / "out.safetensors", dtype=dtype),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_c402_one_warning_with_the_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str, dtype: torch.dtype
) -> None:
    save_file({"w": BIG, "v": BIG.clone()}, tmp_path / "m.safetensors")
    with caplog.at_level(logging.WARNING, "stio"):
        WAYS[way](tmp_path / "m.safetensors", dtype)
    (message,) = warnings_of(caplog)
    assert "6 values" in message and "w (3)" in message and "v (3)" in message


@pytest.mark.parametrize("way", WAYS)
def test_c402_what_was_inf_nan_or_0_is_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str) -> None:
    values = torch.tensor([1.0, 65504.0, -65504.0, 2**-24, -0.0, -torch.inf, -torch.nan])
    save_file({"w": values, "v": values.clone()}, tmp_path / "m.safetensors")
    with caplog.at_level(logging.WARNING, "stio"):
        WAYS[way](tmp_path / "m.safetensors", torch.float16)
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("own", "wanted", "values", "number"),
    [
        (torch.float32, torch.bfloat16, [3.4e38, 1e-45, 1.0, 0.0], 2),
        (torch.float64, torch.float32, [1e300, -1e-300, 1e-3, torch.inf], 2),
        (torch.bfloat16, torch.float16, [1e5, 1e-9, 6e4, torch.nan], 2),
        (torch.float32, torch.float8_e4m3fn, [464.0, 465.0, -1e6, torch.inf], 2),  # torch saturates
        (torch.float8_e5m2, torch.float8_e4m3fn, [57344.0, 1.0, 2**-16, 448.0], 2),
        (torch.int64, torch.float16, [65504, 10**6, 0, 1], 1),
        (torch.int64, torch.int32, [2**31, -(2**31), 5, 0], 1),
        (torch.uint8, torch.int8, [200, 127, 0, 1], 1),
        (torch.uint16, torch.float16, [65504, 65535, 0, 1], 1),  # torch counts nothing in these on the CPU
        (torch.uint32, torch.float8_e4m3fn, [448, 10**6, 0, 1], 1),
        (torch.uint64, torch.float16, [0, 10**6], 1),
        (torch.float8_e5m2, torch.float16, [57344.0, 2**-16, 1.0, 0.0], 0),
        (torch.float8_e8m0fnu, torch.float16, [2**20, 2**-30, 1.0, torch.nan], 2),
        (torch.float8_e8m0fnu, torch.float8_e4m3fn, [2**20, 2**-30, 1.0, torch.nan], 2),
        (torch.float8_e8m0fnu, torch.bfloat16, [2**127, 2**-127, 1.0, torch.nan], 0),
        (torch.float32, torch.float8_e8m0fnu, [0.0, -3.0, 1e-45, 3e38, -3e38, 2**-127, 2.5e38, torch.inf], 5),
        (torch.float16, torch.float8_e8m0fnu, [0.0, -0.0, -torch.inf, torch.inf, 65504.0, 2**-24, torch.nan], 2),
        (torch.float8_e5m2, torch.float8_e8m0fnu, [0.0, -4.0, 2**-16, 57344.0], 2),
        (torch.uint64, torch.float8_e8m0fnu, [0, 1, 2**62], 1),
        (torch.bool, torch.float8_e8m0fnu, [0, 1], 1),
    ],
)
def test_c402_what_is_lost(own: torch.dtype, wanted: torch.dtype, values: list[float], number: int) -> None:
    source = torch.tensor(values, dtype=torch.float64 if own.is_floating_point else torch.int64).to(own)
    lost = Lost()
    lost.count("w", source, source.to(wanted))
    assert lost.get("w", 0) == number


@pytest.mark.parametrize("way", ["load by name", "load_into", "load_into with hooks", "warm_start"])
def test_c402_scales_that_are_powers_of_two(tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str) -> None:
    values = torch.tensor([2.0**20, 2.0**-30, 1, 1, 1, 1, torch.nan])
    path = tmp_path / "m.safetensors"
    for own, wanted in ((torch.float8_e8m0fnu, torch.float16), (torch.float32, torch.float8_e8m0fnu)):
        source = values.to(own) if own != torch.float32 else torch.tensor([0.0, -3.0, 1, 1, 1, 1, torch.nan])
        sync.save({"w": source, "v": torch.ones(7)}, path)
        caplog.clear()
        WAYS[way](path, wanted)
        assert "w (2)" in warnings_of(caplog)[0]


def test_c402_large_tensors_are_counted_in_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = torch.ones(1_000_003)
    source[::200_000] = 1e6
    save_file({"w": source}, tmp_path / "m.safetensors")
    with caplog.at_level(logging.WARNING, "stio"):
        found = sync.load(tmp_path / "m.safetensors", dtype="F16")["w"]
    assert torch.equal(found, source.half()) and found.untyped_storage().nbytes() == found.nbytes
    assert "w (6)" in warnings_of(caplog)[0]


def test_c402_convert_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"w": BIG.reshape(7, 1), "v": BIG[0]}, tmp_path / "m.pt")
    result = sync.convert(tmp_path / "m.pt", tmp_path / "out.safetensors", dtype="F16")
    assert result.out_of_range == {"w": 3} and len(warnings_of(caplog)) == 1
    save_file({"w": torch.full((3, 1 << 19), 1e6)}, tmp_path / "m.safetensors")  # in windows of rows
    runs = [str(tmp_path / "m.safetensors"), str(tmp_path / "out.safetensors"), "--dtype", "F16", "--no-progress"]
    shown = CliRunner().invoke(main, ["convert", *runs])
    assert "1,572,864 values out of the range of F16" in shown.output and shown.exit_code == 0
    shown = CliRunner().invoke(main, ["convert", *runs, "--json"])
    assert json.loads(shown.stdout)["out_of_range"] == {"w": 3 << 19}
    result = sync.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", dtype="BF16", budget_bytes="1MB")
    assert not result.out_of_range
    caplog.clear()
    sync.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", dtype="F16", budget_bytes="1MB")
    assert len(warnings_of(caplog)) == 1


def test_c402_a_copy_into_part_of_a_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What `load_into` of integers and of gaps does: the memory of a target has strides."""
    module = Module(torch.int32)
    module.w = torch.zeros(7, 2, dtype=torch.int32)[:, 0]
    save_file(
        {"w": torch.tensor([2**40, 1, 0, -(2**40), 5, 6, 7]), "v": torch.ones(7, dtype=torch.int64)},
        tmp_path / "m.safetensors",
    )
    sync.load_into(module, tmp_path / "m.safetensors")
    assert "w (2)" in warnings_of(caplog)[0]


# 412: states.


PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.int64, torch.int32),
    (torch.int32, torch.int64),
    (torch.int64, torch.float32),
    (torch.uint8, torch.int8),
    (torch.int64, torch.bool),
    (torch.float16, torch.float32),
    (torch.bool, torch.int64),
    (torch.int16, torch.float32),
]
HELD = [
    (torch.int32, torch.int64),
    (torch.float16, torch.float32),
    (torch.bool, torch.int64),
    (torch.int16, torch.float32),
]


def fill(state: object, path: Path, **keywords: Any) -> None:
    run_blocking(fill_from(path, StateTarget(state, **keywords), LoadOptions()))


@pytest.mark.parametrize(("own", "wanted"), PAIRS)
def test_c412_a_state_is_not_put_into_a_narrower_one(tmp_path: Path, own: torch.dtype, wanted: torch.dtype) -> None:
    sync.save_state({"state": {0: {"m": torch.ones(3, dtype=own)}}}, tmp_path / "state.safetensors")
    state = {"state": {0: {"m": torch.zeros(3, dtype=wanted)}}}
    if (own, wanted) in HELD:
        fill(state, tmp_path / "state.safetensors")
    else:
        with pytest.raises(MismatchError, match=r"state.*casting='same_kind'"):
            fill(state, tmp_path / "state.safetensors")
        assert not state["state"][0]["m"].any()
        fill(state, tmp_path / "state.safetensors", casting="same_kind")
    assert torch.equal(state["state"][0]["m"], torch.ones(3, dtype=wanted))


@pytest.mark.parametrize("own", [torch.int64, torch.bool])
@pytest.mark.parametrize("wanted", ["uint4", "bits8", "bits16", "int1", "float8_e8m0fnu"])
def test_c412_a_dtype_that_does_not_hold_the_values(tmp_path: Path, own: torch.dtype, wanted: str) -> None:
    sync.save_state({"m": torch.zeros(3, dtype=own)}, tmp_path / "state.safetensors")
    with pytest.raises(MismatchError, match="may lose values"):
        fill({"m": torch.empty(3, dtype=getattr(torch, wanted))}, tmp_path / "state.safetensors")


def test_c412_tensors_by_name_are_cast(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are weights, as those of a module."""
    save_file({"w": BIG}, tmp_path / "m.safetensors")
    fill({"w": torch.zeros(7).half()}, tmp_path / "m.safetensors")
    assert "w (3)" in warnings_of(caplog)[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_c412_the_reader_of_torch_s_distributed_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sync.save_state({"optim": {"m": BIG}}, tmp_path / "state.safetensors")
    path = str(tmp_path / "state.safetensors")
    state = {"optim": {"m": torch.zeros(7).bfloat16()}}
    with pytest.raises(BaseException, match="casting='same_kind'"):  # CheckpointException is no Exception
        dcp.load(state, storage_reader=StioStorageReader(path), no_dist=True)
    state = {"optim": {"m": torch.zeros(7).half()}}
    dcp.load(state, storage_reader=StioStorageReader(path, casting="same_kind"), no_dist=True)
    assert torch.equal(state["optim"]["m"].nan_to_num(), BIG.half().nan_to_num())
    assert "(3)" in warnings_of(caplog)[0]
    with pytest.raises(ValueError, match="casting= takes"):
        StioStorageReader(path, casting="unsafe")  # type: ignore[arg-type]


# 439: scales of one element.


def scale(shape: tuple[int, ...], *, device: str = "cpu", buffer: bool = False) -> nn.Module:
    module = nn.Module()
    tensor = torch.zeros(shape, device=device)
    if buffer:
        module.register_buffer("s", tensor)
    else:
        module.s = nn.Parameter(tensor)
    return module


def into(module: nn.Module, path: Path) -> None:
    sync.load_into(module, path)


def assigned(module: nn.Module, path: Path) -> None:
    sync.load_into(module, path, assign=True)


def warm(module: nn.Module, path: Path) -> None:
    with sync.warm_start(module.to("meta") if module._parameters else module, path) as load:
        load.done()


@pytest.mark.parametrize("fill_module", [into, assigned, warm])
@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c439_shape_1_is_put_into_a_scalar(
    tmp_path: Path, fill_module: Callable[[nn.Module, Path], None], buffer: bool, dtype: torch.dtype
) -> None:
    save_file({"s": torch.tensor([0.5], dtype=dtype)}, tmp_path / "m.safetensors")
    module = scale((), buffer=buffer)
    fill_module(module, tmp_path / "m.safetensors")
    assert module.s.shape == () and module.s.item() == 0.5 and not module.s._is_view()


@pytest.mark.parametrize("hooked", [False, True])
def test_c439_tied_scalars_stay_tied(tmp_path: Path, hooked: bool) -> None:
    save_file({name: torch.tensor([7.0]) for name in "st"}, tmp_path / "m.safetensors")
    module = scale(())
    module.t = module.s
    if hooked:
        module.register_load_state_dict_post_hook(lambda *_: None)
    assigned(module, tmp_path / "m.safetensors")
    assert module.s is module.t and module.s.shape == () and module.s == 7


@pytest.mark.parametrize("stored", [(), (3,), (1, 1), (1,)])
@pytest.mark.parametrize("target", [(), (1,), (1, 1)])
def test_c439_as_torch_does(tmp_path: Path, stored: tuple[int, ...], target: tuple[int, ...]) -> None:
    save_file({"s": torch.ones(stored)}, tmp_path / "m.safetensors")
    try:
        scale(target).load_state_dict({"s": torch.ones(stored)})
    except RuntimeError:
        with pytest.raises(MismatchError, match="shape"):
            into(scale(target), tmp_path / "m.safetensors")
        return
    module = scale(target)
    into(module, tmp_path / "m.safetensors")
    assert module.s.shape == target and bool((module.s == 1).all())


def test_c439_in_a_state(tmp_path: Path) -> None:
    sync.save_state({"step": torch.tensor([3.0])}, tmp_path / "state.safetensors")
    state = {"step": torch.tensor(0.0)}
    fill(state, tmp_path / "state.safetensors")
    assert state["step"].shape == () and state["step"] == 3


# 457 and 474: tensors that are not what they seem.


class WithExtra(nn.Module):
    def __init__(self, extra: object) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("extra", [{"steps": 3}, None, [torch.ones(1)]])
def test_c457_extra_state_that_is_no_tensor(tmp_path: Path, extra: object, prefixed: bool) -> None:
    module: nn.Module = WithExtra(extra)
    if prefixed:
        module = nn.Sequential(module)
    with pytest.raises(TypeError, match=r"stio.save_state\(module.state_dict\(\)"):
        sync.save(module, tmp_path / "m.safetensors")
    sync.save_state(module.state_dict(), tmp_path / "m.safetensors")
    assert repr(dict(sync.load_state(tmp_path / "m.safetensors"))) == repr(dict(module.state_dict()))


class Local(torch.Tensor):
    """A subclass that has the fields."""


def checkpointable(tensor: torch.Tensor, shape: tuple[int, ...], at: int, local: int, size: int) -> torch.Tensor:
    described: Any = tensor
    described.global_shape = shape
    described.global_offsets, described.local_offsets, described.local_sizes = ((at,),), ((local,),), ((size,),)
    return tensor


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter, Local])
@pytest.mark.parametrize("save", [sync.save, sync.save_state])
@pytest.mark.parametrize("place", [((8,), 4, 0, 4), ((3,), 0, 0, 3), ((4,), 0, 1, 3)])
def test_c474_parts_of_a_tensor_are_refused(tmp_path: Path, kind: Any, save: Callable[..., Any], place: Any) -> None:
    """By the fields of torch's protocol: torch 2.13 does not have it yet."""
    tensor = torch.ones(4).as_subclass(kind) if kind is not nn.Parameter else nn.Parameter(torch.ones(4))
    with pytest.raises(TypeError, match="CheckpointableTensor"):
        save({"w": checkpointable(tensor, *place)}, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_c474_a_whole_tensor_is_saved(tmp_path: Path) -> None:
    sync.save({"w": checkpointable(torch.ones(4), (4,), 0, 0, 4)}, tmp_path / "m.safetensors")
    assert torch.equal(sync.load(tmp_path / "m.safetensors")["w"], torch.ones(4))


@gpu
def test_c402_on_a_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The device counts; its numbers are read when the load has ended."""
    path, device = tmp_path / "m.safetensors", resolve_device("auto")
    save_file({"w": BIG, "v": BIG.clone()}, path)
    for load in (
        lambda: sync.load(path, device=device, dtype="F16"),
        lambda: sync.load_into(Module(torch.float16).to(device), path),
        lambda: sync.load_into(Module(torch.float16), path, assign=True, device=device, dtype="F16"),
    ):
        caplog.clear()
        load()
        (message,) = warnings_of(caplog)
        assert "6 values" in message and "w (3)" in message and "v (3)" in message
    sync.save({"w": torch.tensor([2.0**20, 2.0**-30, 1.0]).to(torch.float8_e8m0fnu)}, path)
    caplog.clear()
    sync.load(path, device=device, dtype={"w": "F16"})
    assert "w (2)" in warnings_of(caplog)[0]
