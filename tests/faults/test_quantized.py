"""401. Quantized weights and their scales: refused with the names, untouched, or right; never other values in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed.ranks import run_ranks
from faults import on_ranks
from safetensors.torch import save_file
from support import HAVE_E8, needs_f4
from torch import nn

import stio
from stio import sync
from stio.compat.safetensors import safe_open as compat_open
from stio.compat.safetensors import torch as compat
from stio.distributed import StioStorageReader
from stio.errors import MismatchError, UnsupportedDtypeError
from stio.loading.api import fill_from
from stio.loading.options import LoadOptions
from stio.loading.targets.nested import StateTarget
from stio.runtime.notifier import run_blocking

F8 = torch.float8_e4m3fn


def codes(*shape: int) -> torch.Tensor:
    return torch.linspace(-400, 400, int(np.prod(shape))).reshape(shape).to(F8)


def packed(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.uint8).reshape(shape)


LAYOUTS: dict[str, dict[str, torch.Tensor]] = {
    "fp8 by tensor": {"l.weight": codes(4, 8), "l.weight_scale": torch.tensor(1 / 5600)},
    "fp8 by block": {"l.weight": codes(4, 8), "l.weight_scale_inv": torch.full((1, 1), 1 / 5600)},
    "fp8 of ComfyUI": {"l.weight": codes(4, 8), "l.scale_weight": torch.tensor(1 / 5600)},
    "int8": {"l.weight": packed(4, 8).view(torch.int8), "l.SCB": torch.full((4,), 0.08)},
    "nf4": {
        "l.weight": packed(16, 1),
        "l.weight.absmax": torch.full((1,), 1e-3),
        "l.weight.quant_map": torch.linspace(-1, 1, 16),
        "l.weight.quant_state.bitsandbytes__nf4": packed(8),
    },
    "nvfp4": {"l.weight": packed(4, 4), "l.weight_scale": codes(4, 1), "l.weight_scale_2": torch.tensor(1e-5)},
    "mxfp4": {"l.proj_blocks": packed(4, 4), "l.proj_scales": packed(4, 1)},
    "gptq": {
        "l.qweight": packed(4, 8).to(torch.int32),
        "l.scales": torch.full((1, 8), 1e-7, dtype=torch.float32),
        "l.qzeros": packed(1, 1).to(torch.int32),
    },
}
REFUSED = ("fp8 by tensor", "fp8 by block", "fp8 of ComfyUI")
"""Layouts whose weights are floats, which a cast to BF16 would change. The others are integers, which no cast changes."""


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def path(tmp_path: Path, layout: str) -> Path:
    save_file({**LAYOUTS[layout], "norm": torch.tensor([0.1, 1e-3])}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def require_as_stored(found: dict[str, torch.Tensor], layout: str, but: tuple[str, ...] = ()) -> None:
    for name, tensor in LAYOUTS[layout].items():
        if name not in but:
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


async def streamed(path: Path, dtype: Any) -> dict[str, torch.Tensor]:
    async with stio.open(path, dtype=dtype) as checkpoint:
        return {name: tensor async for name, tensor in checkpoint.stream()}


def converted(path: Path, dtype: Any) -> dict[str, torch.Tensor]:
    sync.convert(path, path.parent / "out.safetensors", dtype=dtype)
    return sync.load(path.parent / "out.safetensors")


CASTS: dict[str, Callable[[Path, Any], Any]] = {
    "load": lambda path, dtype: sync.load(path, dtype=dtype),
    "load to copies": lambda path, dtype: sync.load(path, dtype=dtype, memory="copy"),
    "load with a cache": lambda path, dtype: sync.load(path, dtype=dtype, cache=stio.HostCache(1 << 20)),
    "stream": lambda path, dtype: asyncio.run(streamed(path, dtype)),
    "convert": converted,
}


@pytest.mark.matrix
@pytest.mark.parametrize("way", CASTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, "F16"])
def test_c401_a_cast_leaves_quantized_storage_or_refuses(path: Path, layout: str, way: str, dtype: Any) -> None:
    if layout not in REFUSED:
        found = CASTS[way](path, dtype)
        require_as_stored(found, layout)
        assert found["norm"].dtype == (torch.float16 if dtype == "F16" else dtype)
        return
    with pytest.raises(UnsupportedDtypeError) as caught:
        CASTS[way](path, dtype)
    assert "l.weight (with l." in str(caught.value) and "without dtype=" in str(caught.value)
    assert not (path.parent / "out.safetensors").exists()


def test_c401_one_name_of_a_refused_file_may_be_cast(path: Path, layout: str) -> None:
    found = sync.load(path, dtype={"norm": "bfloat16"})
    require_as_stored(found, layout)
    assert found["norm"].dtype == torch.bfloat16
    found = sync.load(path, names=["norm"], dtype="bfloat16")
    assert found["norm"].dtype == torch.bfloat16


def test_c401_a_function_of_the_name_says_what_is_cast(path: Path, layout: str) -> None:
    found = sync.load(path, dtype=lambda name: torch.float64 if name == "norm" else None)
    require_as_stored(found, layout)
    assert found["norm"].dtype == torch.float64


def test_c401_who_names_a_weight_casts_it(tmp_path: Path) -> None:
    save_file(LAYOUTS["fp8 by tensor"], tmp_path / "m.safetensors")
    found = sync.load(tmp_path / "m.safetensors", dtype={"l.weight": torch.float32})
    assert torch.equal(found["l.weight"], LAYOUTS["fp8 by tensor"]["l.weight"].float())
    assert found["l.weight_scale"].dtype == torch.float32


def test_c401_fp8_without_scales_is_cast(tmp_path: Path) -> None:
    save_file({"l.weight": codes(4, 8)}, tmp_path / "m.safetensors")
    assert torch.equal(sync.load(tmp_path / "m.safetensors", dtype="BF16")["l.weight"], codes(4, 8).bfloat16())


@pytest.mark.skipif(not HAVE_E8, reason="this torch has no E8M0")
def test_c401_e8m0_scales_stay(tmp_path: Path) -> None:
    scales = torch.tensor([2.0**20, 2.0**-30, 1.0]).to(torch.float8_e8m0fnu)
    save_file({"scales": scales, "w": torch.ones(3)}, tmp_path / "m.safetensors")
    found = sync.load(tmp_path / "m.safetensors", dtype="float16")
    assert found["scales"].dtype == scales.dtype and found["w"].dtype == torch.float16


@needs_f4
def test_c401_packed_pairs_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    pairs = packed(4, 4).view(torch.float4_e2m1fn_x2)
    sync.save({"p": pairs, "w": torch.ones(3)}, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedDtypeError, match=r"without dtype=.*: p\b"):
        sync.load(tmp_path / "m.safetensors", dtype="BF16")
    found = sync.load(tmp_path / "m.safetensors", dtype={"w": "BF16"})
    assert found["p"].dtype == pairs.dtype and found["w"].dtype == torch.bfloat16


def test_c401_shards_on_their_own(tmp_path: Path) -> None:
    """The scales are in another shard than the weights."""
    sync.save(LAYOUTS["fp8 by tensor"], tmp_path / "model", max_shard_size=32)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 2
    with pytest.raises(UnsupportedDtypeError, match="l.weight_scale"):
        sync.load(tmp_path / "model", dtype="BF16")
    with pytest.raises(UnsupportedDtypeError, match="l.weight_scale"):
        sync.load(tmp_path / "model", names=["l.weight"], dtype="BF16")


@pytest.mark.parametrize("wrong", [{"norm": "int8"}, {3: "bfloat16"}, {0: "bfloat16"}, {"norm": "bfloat61"}])
def test_c401_wrong_values_of_a_mapping(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="dtype="):
        sync.load(tmp_path / "none", dtype=wrong)


@pytest.mark.parametrize("names", [None, ["norm"]])
def test_c401_c408_a_key_that_is_no_name(tmp_path: Path, names: list[str] | None) -> None:
    save_file({"lm_head": torch.ones(3), "norm": torch.ones(3), "a.b.c": torch.ones(1)}, tmp_path / "m.safetensors")
    with pytest.raises(stio.TensorNotFoundError, match="dtype= has an entry .* did you mean 'lm_head'"):
        sync.load(tmp_path / "m.safetensors", dtype={"lm_haed": "BF16"}, names=names)
    for wrong in ({"lm_haed": "cpu", "": "cpu"}, {"": "cpu", "a.bc": "cpu"}):
        with pytest.raises(stio.TensorNotFoundError, match="device= has an entry .* did you mean"):
            sync.load(tmp_path / "m.safetensors", device=wrong, names=names)
    for right in ({"": "cpu"}, {"lm_head": "cpu", "": "cpu"}, {"a": "cpu", "": "cpu"}, {"a.b": "cpu", "": "cpu"}):
        assert "norm" in sync.load(tmp_path / "m.safetensors", device=right, names=names)


# Modules.


def linear(dtype: torch.dtype, **buffers: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.l = nn.Module()
    module.l.register_buffer("weight", torch.zeros(4, 8).to(dtype))
    for name, buffer in buffers.items():
        module.l.register_buffer(name, torch.zeros_like(buffer))
    return module


def into(module: nn.Module, path: Path, **options: Any) -> None:
    sync.load_into(module, path, **options)


def warm(module: nn.Module, path: Path, **options: Any) -> None:
    with sync.warm_start(module, path, **options):
        pass


@pytest.mark.parametrize("fill", [into, warm])
@pytest.mark.parametrize("kind", REFUSED)
def test_c401_codes_into_a_plain_module(tmp_path: Path, kind: str, fill: Callable[..., None]) -> None:
    save_file(LAYOUTS[kind], tmp_path / "m.safetensors")
    module = linear(torch.bfloat16)
    if fill is warm:
        module = module.to("meta")
    with pytest.raises(MismatchError, match="means nothing without its scales"):
        fill(module, tmp_path / "m.safetensors", strict=False)
    if fill is into:
        assert not module.l.weight.any()


@pytest.mark.parametrize("takes_scales", [False, True])
def test_c401_codes_into_a_module_with_load_hooks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, takes_scales: bool
) -> None:
    """What a hook does with the codes is not known: a warning names those whose scales nothing took."""
    save_file(LAYOUTS["fp8 by tensor"], tmp_path / "m.safetensors")
    module = linear(torch.bfloat16)

    def hook(_: object, state: dict[str, torch.Tensor], *others: object) -> None:
        if takes_scales:
            state["l.weight"] = state["l.weight"].float() * state.pop("l.weight_scale")

    module.l.register_load_state_dict_pre_hook(hook)
    with caplog.at_level(logging.WARNING, "stio"):
        report = sync.load_into(module, tmp_path / "m.safetensors", strict=False)
    assert report.unexpected == (() if takes_scales else ("l.weight_scale",))
    said = [record.getMessage() for record in caplog.records if "not their scales" in record.getMessage()]
    assert len(said) == (not takes_scales)
    assert all("l.weight (with l.weight_scale)" in text for text in said)


@pytest.mark.parametrize("assign", [False, True])
def test_c401_plain_weights_into_a_quantized_module(tmp_path: Path, assign: bool) -> None:
    save_file({"l.weight": torch.ones(4, 8)}, tmp_path / "m.safetensors")
    module = linear(F8, weight_scale=torch.tensor(1.0))
    with pytest.raises(MismatchError, match="quantized in the module"):
        sync.load_into(module, tmp_path / "m.safetensors", strict=False, assign=assign)
    assert not module.l.weight.float().any()


@pytest.mark.parametrize("assign", [False, True])
def test_c418_new_codes_with_old_scales(tmp_path: Path, assign: bool) -> None:
    save_file({"l.weight": codes(4, 8)}, tmp_path / "m.safetensors")
    module = linear(F8, weight_scale=torch.tensor(1.0))
    with pytest.raises(MismatchError, match="its scales would not be loaded"):
        sync.load_into(module, tmp_path / "m.safetensors", strict=False, assign=assign)


def test_c418_codes_of_bitsandbytes_without_their_tables(tmp_path: Path) -> None:
    save_file(LAYOUTS["nf4"], tmp_path / "m.safetensors")
    module = nn.Module()
    module.l = nn.Module()
    module.l.register_buffer("weight", torch.zeros(16, 1, dtype=torch.uint8))
    with pytest.raises(MismatchError, match="from_prequantized"):
        sync.load_into(module, tmp_path / "m.safetensors", strict=False)


@pytest.mark.parametrize("assign", [False, True])
def test_c401_a_module_of_the_same_quantization_is_filled(tmp_path: Path, assign: bool) -> None:
    stored = LAYOUTS["fp8 by tensor"]
    save_file(stored, tmp_path / "m.safetensors")
    module = linear(F8, weight_scale=stored["l.weight_scale"])
    sync.load_into(module, tmp_path / "m.safetensors", assign=assign)
    require_as_stored(dict(module.state_dict()), "fp8 by tensor")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_c401_the_reader_of_torch_s_distributed_checkpoint(tmp_path: Path, kind: str) -> None:
    save_file(LAYOUTS[kind], tmp_path / "m.safetensors")
    scales = {name: torch.zeros_like(tensor) for name, tensor in LAYOUTS[kind].items()}
    reader = StioStorageReader(str(tmp_path / "m.safetensors"))
    state = {**scales, "l.weight": torch.zeros(4, 8, dtype=torch.bfloat16)}
    with pytest.raises(BaseException, match="means nothing without its scales"):  # CheckpointException is no Exception
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert not state["l.weight"].any()
    state = {**scales, "l.weight": torch.zeros(4, 8, dtype=F8)}
    dcp.load(state, storage_reader=StioStorageReader(str(tmp_path / "m.safetensors")), no_dist=True)
    require_as_stored(state, kind)


def test_c401_pickles_too(tmp_path: Path) -> None:
    torch.save(LAYOUTS["fp8 by tensor"], tmp_path / "m.pt")
    with pytest.raises(UnsupportedDtypeError, match="l.weight_scale"):
        sync.convert(tmp_path / "m.pt", tmp_path / "out.safetensors", dtype="BF16")
    assert not (tmp_path / "out.safetensors").exists()


# Modules and states, in both directions.


def shell(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> nn.Module:
    """Return a module with buffers of these names and shapes."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module._modules[step] = nn.Module()
            module = module._modules[step]  # type: ignore[assignment]
        module._buffers[leaf] = torch.zeros(tensor.shape, dtype=dtype or tensor.dtype)  # some names exist already
    return root


def into_a_module(tensors: dict[str, torch.Tensor], path: Path) -> None:
    sync.load_into(shell(tensors), path, strict=False)


def into_a_module_by_assignment(tensors: dict[str, torch.Tensor], path: Path) -> None:
    sync.load_into(shell(tensors), path, strict=False, assign=True)


def into_a_warm_module(tensors: dict[str, torch.Tensor], path: Path) -> None:
    warm(shell(tensors), path, strict=False)


def into_a_state(tensors: dict[str, torch.Tensor], path: Path) -> None:
    run_blocking(fill_from(path, StateTarget(tensors), LoadOptions(strict=False)))


FILLS = [into_a_module, into_a_module_by_assignment, into_a_warm_module, into_a_state]


@pytest.mark.matrix
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_c401_quantized_tensors_into_plain_ones(path: Path, layout: str, fill: Callable[..., None], dtype: Any) -> None:
    owner, tensor = next(iter(LAYOUTS[layout].items()))
    with pytest.raises(MismatchError, match="scales"):
        fill({owner: torch.zeros(tensor.shape, dtype=dtype)}, path)


@pytest.mark.matrix
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16])
def test_c401_plain_tensors_into_quantized_ones(
    tmp_path: Path, layout: str, fill: Callable[..., None], dtype: Any
) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in LAYOUTS[layout].items()}
    owner = next(iter(tensors))
    save_file({owner: torch.ones(tensors[owner].shape, dtype=dtype)}, tmp_path / "m.safetensors")
    with pytest.raises(MismatchError):
        fill(tensors, tmp_path / "m.safetensors")
    assert not tensors[owner].float().any()


@pytest.mark.parametrize("fill", [into_a_state])
def test_c401_the_same_quantization_is_filled(path: Path, layout: str, fill: Callable[..., None]) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in LAYOUTS[layout].items()}
    fill(tensors, path)
    require_as_stored(tensors, layout)


def test_c401_states_that_were_saved_as_such(tmp_path: Path, layout: str) -> None:
    sync.save_state({"model": LAYOUTS[layout]}, tmp_path / "state.safetensors")
    for casting in ("safe", "same_kind"):
        wide = {"model": {name: torch.zeros(one.shape) for name, one in LAYOUTS[layout].items()}}
        with pytest.raises(MismatchError, match="quantized|dtype"):
            run_blocking(
                fill_from(tmp_path / "state.safetensors", StateTarget(wide, casting=casting), LoadOptions())  # type: ignore[arg-type]
            )
    same = {"model": {name: torch.zeros_like(one) for name, one in LAYOUTS[layout].items()}}
    into_a_state(same, tmp_path / "state.safetensors")  # type: ignore[arg-type]
    require_as_stored(same["model"], layout)


def test_c401_drop_ins_give_what_is_stored(path: Path, layout: str) -> None:
    require_as_stored(compat.load_file(path), layout)
    with compat_open(path, framework="pt") as file:
        require_as_stored({name: file.get_tensor(name) for name in LAYOUTS[layout]}, layout)


def test_c401_c412_ranks(tmp_path: Path) -> None:
    for kind, tensors in LAYOUTS.items():
        save_file(tensors, tmp_path / f"{kind}.safetensors")
    sync.save_state({"optim": {"m": torch.ones(4), "step": torch.tensor(3)}}, tmp_path / "state.safetensors")
    run_ranks(on_ranks.quantized, 2, tmp_path, str(tmp_path), LAYOUTS)
    run_ranks(on_ranks.narrower, 2, tmp_path, str(tmp_path))
