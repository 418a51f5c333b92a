"""Fault 303: tensors that stand for data they do not hold are refused, with what to call first, and nothing is written.

DeepSpeed and bitsandbytes are not installed here: small objects of ours have the attributes that theirs have.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from support import require_equal
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parameter import UninitializedParameter

import stio
from stio import sync
from stio.compat.huggingface_hub import save_torch_state_dict
from stio.compat.safetensors.torch import save as save_bytes
from stio.compat.safetensors.torch import save_model
from stio.device import describe
from stio.distributed import StioStager, StioStorageWriter


class Status(enum.Enum):
    """As `deepspeed.runtime.zero.partition_parameters.ZeroParamStatus`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2


def partition(parameter: nn.Parameter, number: int = 0) -> None:
    """Move the values of a parameter away, as ZeRO-3 does."""
    attributes = {"ds_id": number, "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
    vars(parameter).update(attributes, ds_tensor=parameter.detach().flatten(), ds_status=Status.NOT_AVAILABLE)
    parameter.data = torch.empty(0)


def gather(parameter: nn.Parameter) -> None:
    """Bring them back, as `GatheredParameters` does; the attributes stay."""
    attributes = vars(parameter)
    parameter.data = attributes["ds_tensor"].view(attributes["ds_shape"])
    attributes["ds_status"] = Status.AVAILABLE


def module(*, biases: bool = True) -> nn.Module:
    """Return a module of two layers, and a buffer that has no elements of its own."""
    made = nn.Sequential(nn.Linear(3, 4, bias=biases), nn.Linear(4, 2, bias=biases))
    made.register_buffer("nothing", torch.empty(0))
    return made


ZERO_FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda made: made,
    "state_dict": lambda made: made.state_dict(),
    "filtered": lambda made: {f"model.{name}": tensor for name, tensor in made.state_dict().items()},
    "parameters": lambda made: dict(made.named_parameters()),
    "keep_vars": lambda made: made.state_dict(keep_vars=True),
    "wrapped": lambda made: nn.DataParallel(made),
}


def require_refused(
    save: Callable[[], object],
    directory: Path,
    match: str,
    error: type[BaseException] | tuple[type[BaseException], ...] = ValueError,
) -> None:
    """Require that a save is refused by name before anything is written."""
    before = sorted(os.listdir(directory))
    with pytest.raises(error, match=match):
        save()
    assert sorted(os.listdir(directory)) == before


@pytest.mark.parametrize("which", ["all", "large"])
@pytest.mark.parametrize("form", ZERO_FORMS)
def test_c303_partitioned_parameters_are_refused(tmp_path: Path, form: str, which: str) -> None:
    """ZeRO-3 leaves small parameters whole."""
    made = module()
    expected = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    parts = [one for one in made.parameters() if which == "all" or one.dim() > 1]
    for number, parameter in enumerate(parts):
        partition(parameter, number)
    given = [ZERO_FORMS[form](made)]
    match = r"0\.weight' is sharded by DeepSpeed ZeRO-3.*GatheredParameters\(list\(module\.parameters\(\)\)\)"
    require_refused(lambda: sync.save(given[0], tmp_path / "m"), tmp_path, match)
    require_refused(lambda: sync.save(given[0], tmp_path / "m.safetensors", shared="clone"), tmp_path, match)
    given.clear()
    for parameter in parts:  # the step that the message names
        gather(parameter)
    sync.save(made, tmp_path / "m")
    require_equal(sync.load(tmp_path / "m"), expected)


@pytest.mark.anyio
async def test_c303_a_saver_goes_on_after_a_refusal(tmp_path: Path) -> None:
    made = module()
    async with stio.Saver() as saver:
        for _ in range(2):
            partition(made[1].weight)
            state = {"model": made.state_dict(), "step": 3}
            for save in (
                lambda: saver.save(made, tmp_path / "m"),
                lambda given=state: saver.save_state(given, tmp_path / "m"),
            ):
                with pytest.raises(ValueError, match=r"'(model/)?1\.weight' is sharded by DeepSpeed"):
                    await save()
            assert not (tmp_path / "m").exists()
            gather(made[1].weight)
        await (await saver.save(made, tmp_path / "m"))


def test_c303_states_and_the_hubs_drop_in(tmp_path: Path) -> None:
    made = module()
    partition(made[1].weight)
    state = {"model": made.state_dict(), "step": 3}
    require_refused(lambda: sync.save_state(state, tmp_path / "s.safetensors"), tmp_path, "DeepSpeed")
    for weights in (dict(made.named_parameters()), made.state_dict()):
        require_refused(lambda given=weights: save_torch_state_dict(given, tmp_path), tmp_path, "DeepSpeed")
    partition(made[0].weight)
    require_refused(lambda: save_model(made, str(tmp_path / "m.safetensors")), tmp_path, "DeepSpeed")


OTHER_WRITERS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "bytes": lambda weights, path: save_bytes(weights),
    "pickle": lambda weights, path: save_torch_state_dict(weights, path, safe_serialization=False),
    "dcp": lambda weights, path: dcp.save(weights, storage_writer=StioStorageWriter(path / "m")),
    "dcp_async": lambda weights, path: dcp.async_save(
        weights, storage_writer=StioStorageWriter(path / "m"), async_stager=StioStager()
    ).result(),
}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("form", ["state_dict", "parameters"])
@pytest.mark.parametrize("write", OTHER_WRITERS)
def test_c303_writers_that_leave_out_what_is_empty(tmp_path: Path, write: str, form: str) -> None:
    made = module()
    partition(made[1].weight)
    match = r"(?s)1\.weight.* is sharded by DeepSpeed ZeRO-3"
    weights = dict(ZERO_FORMS[form](made))
    require_refused(lambda: OTHER_WRITERS[write](weights, tmp_path), tmp_path, match, (ValueError, CheckpointException))
    gather(made[1].weight)
    OTHER_WRITERS[write](dict(ZERO_FORMS[form](made)), tmp_path)


def test_c303_the_message_of_save_model_has_one_next_step(tmp_path: Path) -> None:
    made = module(biases=False)
    del made.nothing
    partition(made[1].weight)
    with pytest.raises(ValueError, match=r"DeepSpeed.*GatheredParameters\(list\(module\.parameters\(\)\)\):`$"):
        save_model(made, str(tmp_path / "m.safetensors"))


def test_c303_what_has_no_elements_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter whose own shape is `[0]`, also under ZeRO-3; buffers; and the search is made only where it is needed."""
    made = nn.Module()
    made.register_parameter("bias", nn.Parameter(torch.empty(0)))
    partition(made.bias)
    sync.save(made, tmp_path / "a")
    require_equal(sync.load(tmp_path / "a"), made.state_dict())
    sync.save({"e": torch.empty(0), "f": torch.empty(0, 3), "g": torch.empty(3, 0)}, tmp_path / "b")

    def never() -> Any:
        raise AssertionError("all objects were listed")

    monkeypatch.setattr(describe.gc, "get_objects", never)
    sync.save({"w": torch.ones(3), "f": torch.empty(0, 3)}, tmp_path / "c")


@pytest.mark.parametrize("attribute", ["ds_id", "ds_status", "ds_tensor"])
def test_c303_one_attribute_is_enough(tmp_path: Path, attribute: str) -> None:
    parameter = nn.Parameter(torch.empty(0))
    setattr(parameter, attribute, 1)
    require_refused(lambda: sync.save({"w": parameter}, tmp_path / "m"), tmp_path, "'w' is sharded by DeepSpeed")
    tensor = torch.ones(1)  # some versions leave one element
    tensor.ds_shape = torch.Size([4, 4])  # type: ignore[attr-defined]
    require_refused(lambda: sync.save({"w": tensor}, tmp_path / "m"), tmp_path, "'w' is sharded by DeepSpeed")


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 2)


def shrunk(nbytes: int) -> dict[str, torch.Tensor]:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(nbytes)
    return {"w": tensor}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (on_meta, "'weight' is on meta: .*Load the module first"),
        (lambda: {"a": torch.ones(1), "b": torch.empty(2, device="meta")}, "'b' is on meta"),
        (lambda: {"a": torch.empty(0, device="meta")}, "'a' is on meta"),
        (lambda: shrunk(0), "'w' has no data: .*awake or gathered"),
        (lambda: shrunk(16), "'w' has no data: .*awake or gathered"),
        (lambda: nn.LazyLinear(3), "'weight' is a lazy parameter without data; run the module once"),
        (lambda: {"w": UninitializedParameter()}, "'w' is a lazy parameter without data"),
        (lambda: nn.LazyBatchNorm1d(), "is a lazy parameter without data"),
    ],
)
def test_c303_meta_freed_and_uninitialized(tmp_path: Path, make: Callable[[], Any], match: str) -> None:
    given = make()
    require_refused(lambda: sync.save(given, tmp_path / "m"), tmp_path, match)
    tensors = dict(given.state_dict()) if isinstance(given, nn.Module) else given
    require_refused(lambda: sync.save_state({"x": tensors}, tmp_path / "m"), tmp_path, match.lstrip("'"))


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_c303_modules_that_accelerate_offloads(tmp_path: Path, offload: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    modeling = pytest.importorskip("accelerate.utils.modeling")
    made = module()
    expected = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    if offload == "cpu":
        accelerate.cpu_offload(made, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(made, str(tmp_path / "offload"), execution_device=torch.device("cpu"))
    match = r"'0\.weight' is on meta.*get_state_dict_offloaded_model\(module\)"
    for given in (made, made.state_dict()):
        require_refused(lambda given=given: sync.save(given, tmp_path / "m"), tmp_path, match)
    sync.save(made.state_dict() | modeling.get_state_dict_offloaded_model(made), tmp_path / "m")
    require_equal(sync.load(tmp_path / "m"), expected)


class Params4bit(nn.Parameter):
    """As that of bitsandbytes: packed values; `quant_state` has their scales."""

    quant_state: Any = None
    SCB: Any = None


@pytest.mark.parametrize(("attribute", "scales"), [("quant_state", "fc.weight.absmax"), ("SCB", "fc.SCB")])
def test_c303_quantized_values_without_their_scales(tmp_path: Path, attribute: str, scales: str) -> None:
    packed = Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    sync.save({"fc.weight": packed}, tmp_path / "plain")  # not quantized yet
    setattr(packed, attribute, object())
    match = r"'fc\.weight' holds quantized values.*save `state_dict\(\)` of the module"
    require_refused(lambda: sync.save({"fc.weight": packed}, tmp_path / "m"), tmp_path, match)
    sync.save({"fc.weight": packed, scales: torch.ones(1)}, tmp_path / "m")


def flat_on_ranks(folder: str) -> None:
    """FSDP1: flat parameters, slices of them, shards; and what the messages say to save."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    rank = torch.distributed.get_rank()
    for original in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        expected = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        cpu = torch.device("cpu")
        sharded = FullyShardedDataParallel(plain, use_orig_params=original, device_id=cpu)
        where = Path(folder, f"{rank}-{original}")
        where.mkdir()
        for given in (dict(sharded.named_parameters()), sharded.module, sharded.module.state_dict()):
            match = "is a part of a flat parameter of FSDP; .*FULL_STATE_DICT"
            require_refused(lambda given=given, where=where: sync.save(given, where / "m"), where, match)
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
            shards = sharded.state_dict()
        require_refused(
            lambda given=shards, where=where: sync.save(given, where / "m"), where, "FULL_STATE_DICT", TypeError
        )
        with FullyShardedDataParallel.summon_full_params(sharded):
            sync.save(dict(sharded.named_parameters()), where / "summoned")
        sync.save(sharded, where / "m")
        for name in ("summoned", "m"):
            require_equal(sync.load(where / name), expected)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    yield


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_c303_flat_parameters_of_fsdp(tmp_path: Path) -> None:
    run_ranks(flat_on_ranks, 2, tmp_path, str(tmp_path))
