"""Loading into modules: names, ties, buffers, meta, and what is refused before a byte is read."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest
import safetensors.torch
import torch
from anyio.to_thread import run_sync
from fakes import FakeDevice
from support import HookedRoot, module_of, nothing_left, oracle, ramp, require_equal, save_file
from torch import nn

import stio
from stio import sync
from stio.errors import DeviceMemoryError, MismatchError
from stio.loading.targets.module import ModuleTarget

pytestmark = pytest.mark.anyio


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, device=device)
        self.norm = nn.LayerNorm(4, device=device)
        self.head = nn.Linear(4, 6, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, device=device))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)  # no checkpoint holds it


def filled() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": ramp(6, 4),
        "norm.weight": ramp(4),
        "norm.bias": ramp(4, start=2),
        "steps": ramp(3, start=5),
    }


@pytest.fixture
def untied_file(tmp_path):
    """As the reference library saves a tied model: one of the names is dropped."""
    return save_file(filled(), tmp_path / "model.safetensors")


@pytest.fixture
def aliased_file(tmp_path):
    return save_file(
        filled(), tmp_path / "model.safetensors", {"stio.aliases": json.dumps({"head.weight": "embed.weight"})}
    )


@pytest.fixture
def file(request, tmp_path):
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


BOTH = pytest.mark.parametrize("file", ["untied_file", "aliased_file"], indirect=True)


@pytest.mark.matrix
@BOTH
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
async def test_tied_weights_stay_tied(file, assign, device):
    if device == "meta" and not assign:
        return
    model = Tied(device)
    report = await stio.load_into(model, file, assign=assign)
    assert (report.missing, report.unexpected) == ((), ())
    assert model.head.weight is model.embed.weight
    expected = filled()
    found = {name: value.detach() for name, value in model.state_dict().items()}
    assert torch.equal(found.pop("head.weight"), expected["embed.weight"])
    require_equal(found, expected)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert len(list(model.parameters())) == 3


async def test_copying_keeps_the_parameter_objects(untied_file):
    model = Tied()
    before = dict(model.named_parameters())
    model.norm.bias.requires_grad_(False)
    versions = {name: p._version for name, p in before.items()}
    await stio.load_into(model, untied_file)
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert parameter.requires_grad is (name != "norm.bias")
        assert parameter._version > versions[name]
        assert parameter.grad is None


async def test_assigning_keeps_requires_grad(untied_file):
    model = Tied("meta")
    model.norm.bias.requires_grad_(False)
    await stio.load_into(model, untied_file, assign=True)
    assert not model.norm.bias.requires_grad
    assert model.norm.weight.requires_grad
    assert isinstance(model.norm.weight, nn.Parameter)
    assert model.steps.device.type == "cpu"
    assert not isinstance(model.steps, nn.Parameter)
    assert model.hidden.device.type == "cpu"  # not persistent: no part of a checkpoint


async def test_assigned_parameters_train(untied_file):
    model = Tied("meta")
    await stio.load_into(model, untied_file, assign=True)
    assert all(parameter.is_leaf for parameter in model.parameters())
    model.head(model.norm(model.embed(torch.tensor([1, 2])))).nan_to_num().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


@pytest.mark.parametrize(
    ("names", "prefix", "advice"),
    [
        (["a", "b.w"], "model.", "module's names begin with 'model.': load into the submodule module.model"),
        (
            ["a", "b.w"],
            "base.model.",
            "module's names begin with 'base.model.': load into the submodule module.base.model",
        ),
        (["a", "b.w", "c"], "model.", "module's names begin with 'model.', 3 of 4: load into"),
    ],
)
async def test_names_that_differ_by_a_prefix(tmp_path, names, prefix, advice):
    tensors = {name: ramp(3) for name in names}
    more = {"head": ramp(2)} if "3 of 4" in advice else {}
    save_file(tensors, tmp_path / "bare.safetensors")
    module = module_of({**{prefix + name: tensor for name, tensor in tensors.items()}, **more})
    with pytest.raises(MismatchError) as caught:
        await stio.load_into(module, tmp_path / "bare.safetensors")
    assert f"; only the {advice}" in str(caught.value)
    submodule = module.get_submodule(prefix[:-1])
    await stio.load_into(submodule, tmp_path / "bare.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "long.safetensors")
    with pytest.raises(MismatchError) as caught:
        await stio.load_into(submodule, tmp_path / "long.safetensors")
    assert f"; only the checkpoint's names begin with {prefix!r}: load with stio.load" in str(caught.value)


async def test_names_that_differ_otherwise_get_no_advice_on_prefixes(tmp_path):
    save_file({"x.a": ramp(3), **{f"w{k}": ramp(1) for k in range(9)}}, tmp_path / "m.safetensors")
    with pytest.raises(MismatchError) as caught:
        await stio.load_into(module_of({"a": ramp(3), "b": ramp(3)}), tmp_path / "m.safetensors")
    assert "begin with" not in str(caught.value)


@pytest.mark.matrix
@pytest.mark.parametrize("hooked", [False, True])
async def test_the_tree_of_a_state_is_not_unexpected(tmp_path, hooked):
    """A long tree is a tensor of stio's own in the file."""
    state = {"weight": ramp(2, 3), "bias": ramp(2), "history": list(range(30_000))}
    await stio.save_state(state, tmp_path / "m.safetensors")
    assert "/stio.state" in await stio.load(tmp_path / "m.safetensors")
    model = nn.Linear(3, 2)
    if hooked:
        model.register_load_state_dict_pre_hook(lambda *_: None)
    report = await stio.load_into(model, tmp_path / "m.safetensors")
    assert report.missing == report.unexpected == ()
    assert torch.equal(model.weight, ramp(2, 3)) and torch.equal(model.bias, ramp(2))


async def test_missing_and_unexpected_names(tmp_path):
    root_dir = tmp_path / "model"
    save_file({"weight": ramp(2, 3), "extra": ramp(5), "more\x1b[0m": ramp(1)}, root_dir / "model.safetensors")
    root = HookedRoot(root_dir)
    model = nn.Linear(3, 2)
    before = model.bias.detach().clone()
    with pytest.raises(MismatchError, match="missing bias; unexpected") as caught:
        await stio.load_into(model, root)
    assert "extra" in str(caught.value)
    assert "strict=False" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert root.data_bytes_read == 0
    report = await stio.load_into(model, root, strict=False)
    assert report.missing == ("bias",)
    assert set(report.unexpected) == {"extra", "more\x1b[0m"}
    assert torch.equal(model.weight, ramp(2, 3))
    assert torch.equal(model.bias, before)
    async with stio.open(root_dir) as checkpoint:
        with pytest.raises(MismatchError):
            await checkpoint.load_into(model)
        assert (await checkpoint.load_into(model, strict=False)).missing == ("bias",)
    async with stio.open(root_dir, strict=False) as checkpoint:
        assert (await checkpoint.load_into(model)).missing == ("bias",)
        with pytest.raises(MismatchError):
            await checkpoint.load_into(model, strict=True)
    root.close()


async def test_long_lists_are_cut(tmp_path):
    file = save_file({f"t{k}": ramp(2) for k in range(50)}, tmp_path / "x.safetensors")
    with pytest.raises(MismatchError, match=r"and \d+ others"):
        await stio.load_into(nn.Linear(2, 2), file)
    module = nn.ParameterDict({f"t{k}": torch.zeros(3) for k in range(50)})
    with pytest.raises(MismatchError, match=r"t0 is \[2\] in the checkpoint, \[3\] in the module.* and \d+ others"):
        await stio.load_into(module, file)


async def test_values_are_cast_to_the_module(untied_file):
    model = Tied().to(torch.bfloat16)
    await stio.load_into(model, untied_file)
    assert torch.equal(model.norm.weight, filled()["norm.weight"].bfloat16())
    model = Tied("meta")
    await stio.load_into(model, untied_file, assign=True, dtype=torch.float64)
    assert model.norm.weight.dtype == torch.float64


async def test_meta_modules_want_assign(untied_file):
    with pytest.raises(MismatchError, match="assign=True: "):
        await stio.load_into(Tied("meta"), untied_file)


async def test_an_error_leaves_an_assigned_module_untouched(untied_file, tmp_path):
    root = HookedRoot(tmp_path)
    model = Tied("meta")

    def fail(*_):
        raise OSError(5, "mine")

    root.hook = fail
    with pytest.raises(OSError, match="mine"):
        await stio.load_into(model, root, assign=True)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    root.close()


async def test_a_loops_thread_makes_no_parameters(untied_file, monkeypatch):
    """Beside a busy Python thread each call of torch's may cost 5 ms: 10,000 parameters took 0.16 s of the loop's time."""
    make, threads = ModuleTarget.make, []
    monkeypatch.setattr(ModuleTarget, "make", lambda self: (threads.append(threading.get_ident()), make(self)))
    model = Tied("meta")
    await stio.load_into(model, untied_file, assign=True)
    made = model.embed.weight
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert made is model.head.weight
    assert torch.equal(made, filled()["embed.weight"])


async def test_assigned_on_a_device(untied_file):
    device = FakeDevice()
    model = Tied("meta")
    await stio.load_into(model, untied_file, assign=True, device=device)
    assert device.num_pending == 0
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, filled()["embed.weight"])
    assert torch.equal(model.steps, filled()["steps"])


async def test_c96_a_full_device_is_empty_again_where_the_error_is_handled(tmp_path):
    """Its traceback is alive there, and code that frees memory and tries again with less must find it."""
    file = save_file({f"t{k}": ramp(1000, 1000) for k in range(8)}, tmp_path / "x.safetensors")
    module = nn.ParameterDict({f"t{k}": nn.Parameter(torch.empty(1000, 1000, device="meta")) for k in range(8)})
    device = FakeDevice(memory_bytes=20 << 20)
    blocking = partial(sync.load_into, module, file, assign=True, device=device)
    for load in (partial(stio.load_into, *blocking.args, **blocking.keywords), partial(run_sync, blocking)):
        try:
            await load()
        except DeviceMemoryError:
            assert device.peak_bytes > 0
            assert device.used_bytes == 0
        else:
            pytest.fail("32 MB went into 20 MiB")
    assert all(parameter.is_meta for parameter in module.values())


async def test_a_target_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path):
    save_file({f"t{k}": ramp(40, 1000) for k in range(8)}, tmp_path / "x.safetensors")
    root = HookedRoot(tmp_path)
    module = module_of(
        {f"t{k}": torch.zeros(1).expand(40, 1000) if k == 7 else torch.zeros(40, 1000) for k in range(8)}
    )
    with pytest.raises(MismatchError, match=r"t7 cannot be filled: its elements share memory"):
        await stio.load_into(module, root)
    assert root.data_bytes_read == 0
    assert not module.t0.any()
    root.close()


async def test_sync_twins(untied_file, monkeypatch):
    monkeypatch.setattr(sync, "_warned", True)
    model = Tied("meta")
    assert sync.load_into(model, untied_file, assign=True) == stio.LoadReport((), ())
    other = Tied()
    with sync.open(untied_file) as checkpoint:
        checkpoint.load_into(other)
    assert model.head.weight is model.embed.weight
    require_equal(dict(model.state_dict()), dict(other.state_dict()))
    with pytest.raises(MismatchError):
        sync.load_into(nn.Linear(1, 1), untied_file)


async def test_aliases_are_one_object(aliased_file):
    tensors = await stio.load(aliased_file)
    assert tensors["head.weight"] is tensors["embed.weight"]
    async with stio.open(aliased_file) as checkpoint:
        found = {name: tensor async for name, tensor in checkpoint.stream()}
        assert found["head.weight"] is found["embed.weight"]
        assert checkpoint.aliases == {"head.weight": "embed.weight"}
        part = await checkpoint.read("head.weight", 2)
        assert torch.equal(part, filled()["embed.weight"][2])


async def test_what_the_reference_library_saved(tmp_path):
    """Its `save_model` drops one of the tied names and notes that in the metadata."""
    model = Tied()
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    assert len(oracle(tmp_path / "model.safetensors")) == 4
    for assign in [False, True]:
        other = Tied("meta" if assign else "cpu")
        await stio.load_into(other, tmp_path, assign=assign)
        assert other.head.weight is other.embed.weight
        require_equal(dict(other.state_dict()), dict(model.state_dict()))


async def test_a_module_that_overrides_register_parameter_is_told(tmp_path) -> None:
    """As by `load_state_dict(assign=True)`, which sets attributes."""

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[str] = []
            self.weight = nn.Parameter(torch.zeros(4))

        def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
            self.told.append(name)
            super().register_parameter(name, param)

    await stio.save({"weight": torch.ones(4)}, tmp_path / "w.safetensors")
    module = Told()
    await stio.load_into(module, tmp_path / "w.safetensors", assign=True)
    assert module.told == ["weight", "weight"]
    assert torch.equal(module.weight, torch.ones(4))


@pytest.mark.parametrize(("target", "kind"), [({"a": torch.zeros(3)}, "a dict"), (nn.Linear, "the class Linear")])
async def test_what_is_no_module_is_refused_with_what_to_call(tmp_path, target, kind) -> None:
    await stio.save({"a": torch.ones(3)}, tmp_path / "w.safetensors")
    with pytest.raises(TypeError, match=f"takes a module, not {kind}; stio.load returns"):
        await stio.load_into(target, tmp_path / "w.safetensors")
    async with stio.open(tmp_path / "w.safetensors") as checkpoint:
        with pytest.raises(TypeError, match="takes a module"):
            await checkpoint.load_into(target)
    if kind == "a dict":  # the step
        await stio.distributed.load_into(target, tmp_path / "w.safetensors")
        assert torch.equal(target["a"], torch.ones(3))


def in_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 2)


class Whole(nn.Module):
    """A module whose buffer has whole numbers, or elements that share memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", torch.zeros(2))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: nn.Linear(3, 2, device="meta"), "call module.to_empty"),
        (lambda: Whole(torch.zeros(2, 3, dtype=torch.int8)), "give the module the dtype"),
        (lambda: Whole(torch.zeros(1).expand(2, 3)), r"give a clone\(\) of it"),
        (in_inference, "load inside torch.inference_mode"),
    ],
    ids=["meta", "dtype", "overlap", "inference"],
)
async def test_loads_of_ranks_do_not_advise_a_keyword_that_they_lack(tmp_path, make, remedy) -> None:
    file = tmp_path / "w.safetensors"
    await stio.save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, file)
    with pytest.raises(MismatchError, match="assign=True"):
        await stio.load_into(make(), file)
    with pytest.raises(MismatchError, match=remedy) as caught:
        await stio.distributed.load_into(make(), file)
    assert "assign=" not in str(caught.value)
