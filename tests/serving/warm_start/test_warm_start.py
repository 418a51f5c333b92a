"""Warm starts: what a forward sees, in which order, what is compared before, and what is there at the end."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections import deque
from functools import partial

import pytest
import torch
from counts import count
from fakes import FakeDevice
from loops import others_are_slow
from support import (
    PATIENCE_SECONDS,
    HookedRoot,
    eventually,
    eventually_async,
    needs_f4,
    nothing_left,
    ramp,
    require_equal,
    save_file,
    save_sharded,
)
from torch import nn
from warm import TOKENS, Net, alike, held, in_thread, load_of, made, on_meta, saved

import stio
from stio import sync
from stio.errors import ClosedError, MismatchError, TensorNotFoundError, UnsupportedDtypeError

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(sync, "_warned", True)  # some hold a load in a loop's thread, which is what is tested
    with nothing_left():
        yield


@pytest.fixture
def directory(tmp_path):
    return saved(made(Net), tmp_path)


class Dam:
    """Lets so many bytes of data pass, in the order in which they are asked for; for `HookedRoot.hook`."""

    def __init__(self, nbytes):
        self.left = nbytes
        self.queue = deque()
        self.changed = threading.Condition()

    def __call__(self, *read):
        with self.changed:
            self.queue.append(read)
            passes = self.changed.wait_for(lambda: self.queue[0] == read and self.left >= read[2], 5)
            assert passes, "nobody opened the dam"
            self.queue.popleft()
            self.left -= read[2]
            self.changed.notify_all()

    def open(self, nbytes=1 << 60):
        with self.changed:
            self.left += nbytes
            self.changed.notify_all()


# What a forward sees.


async def test_a_forward_inside_the_block(directory):
    real, module = made(Net), on_meta(Net)
    before = dict(module.named_parameters())
    async with stio.warm_start(module, directory) as warm:
        with torch.no_grad():
            assert alike(module(TOKENS), real(TOKENS))
        report = await warm.done()
        assert await warm.done() == report
    assert report == stio.LoadReport((), ())
    require_equal(dict(module.state_dict()), dict(real.state_dict()))
    for name, parameter in module.named_parameters():
        assert parameter is before[name]
        assert type(parameter) is nn.Parameter
        assert vars(parameter) == {}
    assert module.head.weight is module.embed.weight
    assert not any(part._forward_pre_hooks for part in module.modules())


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["auto", "map", "lazy", "copy"])
@pytest.mark.parametrize("num_shards", [1, 3])
async def test_ways_to_memory(tmp_path, memory, num_shards):
    real = made(lambda: nn.Sequential(*[nn.Linear(40, 40) for _ in range(9)]))
    directory = save_sharded({n: t.detach() for n, t in real.named_parameters()}, tmp_path, num_shards)
    module = on_meta(lambda: nn.Sequential(*[nn.Linear(40, 40) for _ in range(9)]))
    x = torch.rand(2, 40)
    async with stio.warm_start(module, directory, memory=memory, budget_bytes=16 << 10):
        with torch.inference_mode():
            assert torch.equal(module(x), real(x))
    require_equal(dict(module.state_dict()), dict(real.state_dict()))


async def test_leaving_waits_for_everything(directory):
    module = on_meta(Net)
    async with stio.warm_start(module, directory):
        pass
    require_equal(dict(module.state_dict()), dict(made(Net).state_dict()))


async def test_a_forward_that_blocks_the_loop(tmp_path):
    """The load needs nothing of the loop's thread: a forward may hold it from the first read to the last."""
    real, module = made(Net), on_meta(Net)
    root = HookedRoot(saved(real, tmp_path))
    root.hook = dam = Dam(4096)  # the buffers
    async with stio.warm_start(module, root):
        opener = threading.Timer(0.05, dam.open)
        opener.start()
        with torch.inference_mode():
            out = module(TOKENS)  # no await from here until it is there
        assert alike(out, real(TOKENS))
        opener.join()
    root.close()


async def test_the_loop_goes_on_while_another_thread_waits(tmp_path):
    with held(Net, tmp_path) as load:
        with in_thread(load.module, TOKENS) as running:
            assert await eventually_async(load.waiters)
            assert not running.over.is_set()
            load.gate.opened.set()
            assert await eventually_async(running.over.is_set)
        assert alike(running.outcome(), load.real(TOKENS))


def test_sync_twin(directory):
    module = on_meta(Net)
    with sync.warm_start(module, directory) as warm:
        with torch.no_grad():
            assert alike(module(TOKENS), made(Net)(TOKENS))
        assert warm.done() == stio.LoadReport((), ())
    with sync.warm_start(on_meta(Net), directory):
        pass


# Order.


def stack(count=8, width=256):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


async def test_the_first_submodule_runs_before_a_quarter_is_read(tmp_path):
    """The storage gives the first quarter of the file and no more until the first submodule has run."""
    real, module = made(partial(stack, 16)), on_meta(partial(stack, 16))
    root = HookedRoot(saved(real, tmp_path))
    size = (tmp_path / "model.safetensors").stat().st_size
    opened = threading.Event()
    root.hook = lambda name, offset, nbytes: offset < size // 4 or opened.wait(PATIENCE_SECONDS)
    x = torch.rand(3, 256)
    async with stio.warm_start(module, root):
        with torch.inference_mode():
            assert torch.equal(module[0](x), real[0](x))
            assert module[15].weight.is_meta
            opened.set()
            assert torch.equal(module(x), real(x))
    root.close()


@pytest.mark.matrix
@pytest.mark.parametrize("order", ["given", "learned"])
async def test_execution_order(tmp_path, order):
    """Submodules run from the last to the first, and little more can be read than each of them needs."""
    real, module = made(stack), on_meta(stack)
    root = HookedRoot(saved(real, tmp_path))
    size = (tmp_path / "model.safetensors").stat().st_size
    root.hook = dam = Dam(size // 8)  # for what workers have begun when they learn of another wish
    given = {"order": [str(k) for k in reversed(range(8))]} if order == "given" else {}
    x, num_late = torch.rand(3, 256), 0
    async with stio.warm_start(module, root, memory="copy", **given) as warm:
        for k in reversed(range(8)):
            with in_thread(module[k], x) as running:
                assert eventually(lambda: load_of(warm).notifier._wakers or running.over.is_set())
                dam.open(size // 4)  # in the module's own order the first round would not do
                if not eventually(running.over.is_set, 1):
                    num_late += 1  # on a busy machine workers may have begun more
                    dam.open(size // 4)
            assert torch.equal(running.outcome(), real[k](x))
        dam.open()
    assert num_late <= 1
    root.close()


async def test_order_takes_parameters_and_submodules(directory):
    module, root = on_meta(Net), HookedRoot(directory)
    root.hook = dam = Dam(4096)  # the buffers: the list is given up when the last parameter is there
    async with stio.warm_start(module, root, order=["norm", "attention.in_proj_weight", "head.weight"]) as warm:
        assert list(load_of(warm)._by_source)[:4] == [
            "norm.weight",
            "norm.bias",
            "attention.in_proj_weight",
            "embed.weight",
        ]
        dam.open()
    root.hook = dam = Dam(4096)
    async with stio.warm_start(on_meta(Net), root, order="norm") as warm:
        assert next(iter(load_of(warm)._by_source)) == "norm.weight"
        dam.open()
    root.close()
    module = on_meta(Net)
    for wrong in ["absent", "nor", "norm.", ""]:
        with pytest.raises(TensorNotFoundError, match="order="):
            async with stio.warm_start(module, directory, order=[wrong]):
                pass
    require_untouched(module)


# What is compared before.


def require_untouched(module):
    for parameter in module.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.device.type == "meta"
        assert vars(parameter) == {}
    assert not any(part._forward_pre_hooks for part in module.modules())


async def refused(module, source, error, match, **keywords):
    with pytest.raises(error, match=match):
        async with stio.warm_start(module, source, **keywords):
            raise AssertionError("the block was entered")


async def test_names_and_shapes_are_compared_before_anything_is_read(tmp_path):
    save_file({"weight": ramp(2, 3), "extra": ramp(5)}, tmp_path / "model.safetensors")
    root = HookedRoot(tmp_path)
    with torch.device("meta"):
        module, other = nn.Linear(3, 2), nn.Linear(2, 2)
    await refused(module, root, MismatchError, "missing bias; unexpected extra")
    await refused(
        other, root, MismatchError, r"weight is \[2, 3\] in the checkpoint, \[2, 2\] in the module", strict=False
    )
    require_untouched(module)
    require_untouched(other)
    assert root.data_bytes_read == 0
    root.close()


async def test_not_strict(tmp_path):
    save_file({"weight": ramp(2, 3), "extra": ramp(5)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    async with stio.warm_start(module, tmp_path, strict=False) as warm:
        assert torch.equal(module.weight, ramp(2, 3))
        with pytest.raises(TensorNotFoundError, match="strict=False"):
            module.bias + 1
        report = await warm.done()
        assert type(module.bias) is nn.Parameter
    assert report == stio.LoadReport(("bias",), ("extra",))
    assert module.bias.is_meta  # as load_into leaves it
    assert vars(module.bias) == {}


async def test_real_parameters(tmp_path, directory):
    """What has data already is refused if the checkpoint has some too, and left alone if not."""
    module = on_meta(Net)
    module.norm = nn.LayerNorm(8)
    await refused(module, directory, MismatchError, r"have data.*load_into copies: norm.weight, norm.bias")
    module = on_meta(Net)
    module.adapter = nn.Linear(2, 2)
    before = module.adapter.weight.detach().clone()
    async with stio.warm_start(module, directory, strict=False) as warm:
        assert torch.equal(module.adapter.weight, before)
        assert set((await warm.done()).missing) == {"adapter.weight", "adapter.bias"}


async def test_buffers_are_real_from_the_start(tmp_path):
    with held(Net, tmp_path) as load:
        assert torch.equal(load.module.steps, torch.arange(1.0, 4.0))
        assert torch.equal(load.module.hidden, torch.ones(1))
        assert load.module.embed.weight.is_meta


async def test_real_buffers_are_copied_into(directory):
    module = on_meta(Net)
    module._buffers["steps"] = steps = torch.zeros(3)
    async with stio.warm_start(module, directory):
        assert module.steps is steps
        assert torch.equal(steps, torch.arange(1.0, 4.0))


async def test_buffers_without_data_are_an_error(tmp_path, directory):
    with torch.device("meta"):
        module = Net()
    await refused(module, directory, MismatchError, "on 'meta'.*hidden")
    require_untouched(module)
    state = {name: t for name, t in made(Net).state_dict().items() if name not in ("steps", "head.weight")}
    save_file(state, tmp_path / "less" / "model.safetensors")
    await refused(on_meta(Net), tmp_path / "less", MismatchError, "buffers.*steps", strict=False)


async def test_casts(tmp_path):
    """To the module's dtype as load_into does, or to what was asked for; known before the data is."""
    save_file(
        {"weight": ramp(4, 3).nan_to_num(), "bias": ramp(4, dtype=torch.float16).nan_to_num()},
        tmp_path / "m.safetensors",
    )
    for wish, weight in [(None, torch.bfloat16), (torch.float64, torch.float64)]:
        module = nn.Linear(3, 4, device="meta", dtype=torch.bfloat16)
        async with stio.warm_start(module, tmp_path, dtype=wish):
            assert module.weight.dtype == module.bias.dtype == weight
            assert torch.equal(module.weight, ramp(4, 3).nan_to_num().to(weight))
        assert module.weight.dtype == module.bias.dtype == weight
        assert module.weight.requires_grad


async def test_dtypes_that_cannot_be(tmp_path):
    save_file({"weight": ramp(4, 3, dtype=torch.int32), "bias": ramp(4)}, tmp_path / "m.safetensors")
    module = nn.Linear(3, 4, device="meta")
    module.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.int32, device="meta"), requires_grad=False)
    module.bias = nn.Parameter(torch.zeros(4, dtype=torch.int32, device="meta"), requires_grad=False)
    await refused(module, tmp_path, MismatchError, "would lose the values")
    assert all(parameter.is_meta for parameter in module.parameters())
    with pytest.raises(ValueError, match="would lose their values"):
        stio.warm_start(nn.Linear(3, 4, device="meta"), tmp_path, dtype=torch.int32)


@needs_f4
async def test_f4_cannot_be_cast(tmp_path):
    fours = {"weight": torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "bias": ramp(4)}
    save_file(fours, tmp_path / "4" / "m.safetensors")
    await refused(nn.Linear(2, 4, device="meta"), tmp_path / "4", UnsupportedDtypeError, "cannot cast")


# Ties.


@pytest.mark.matrix
@pytest.mark.parametrize("with_aliases", [False, True])
@pytest.mark.parametrize("both", [False, True])
async def test_tied_weights(tmp_path, with_aliases, both):
    """One object under two names, whichever of them the checkpoint has."""
    real = made(Net)
    state = {name: value.detach() for name, value in real.named_parameters()} | {"steps": real.steps}
    metadata = None
    if both:
        state["head.weight"] = state["embed.weight"].clone()
    elif with_aliases:
        metadata = {"stio.aliases": json.dumps({"embed.weight": "head.weight"})}
        state["head.weight"] = state.pop("embed.weight")
    save_file(state, tmp_path / "m.safetensors", metadata)
    module = on_meta(Net)
    async with stio.warm_start(module, tmp_path, order=["head"]) as warm:
        with torch.no_grad():
            assert alike(module(TOKENS), real(TOKENS))
        assert await warm.done() == stio.LoadReport((), ())
    assert module.head.weight is module.embed.weight


async def test_names_that_only_the_checkpoint_ties(tmp_path):
    """Two parameters get memory of their own: the module says that they are two."""
    weight = ramp(5, 5).nan_to_num()
    save_file({"0.weight": weight}, tmp_path / "m.safetensors", {"stio.aliases": json.dumps({"1.weight": "0.weight"})})
    module = nn.Sequential(*[nn.Linear(5, 5, bias=False, device="meta") for _ in range(2)])
    async with stio.warm_start(module, tmp_path):
        pass
    assert torch.equal(module[0].weight, weight)
    assert torch.equal(module[1].weight, weight)
    assert module[0].weight.data_ptr() != module[1].weight.data_ptr()


async def test_streams_promote_by_aliases(tmp_path):
    tensors = {f"t{k}": ramp(2000) for k in range(20)}
    save_file(tensors, tmp_path / "m.safetensors", {"stio.aliases": json.dumps({"alias": "t19"})})
    for late in [False, True]:
        async with stio.open(tmp_path, memory="copy", budget_bytes=1) as checkpoint, checkpoint.stream() as stream:
            order = [(await anext(stream))[0]] if late else []
            stream.promote(["alias"])
            order += [name async for name, _ in stream]
        assert order.index("alias") <= 4
        assert len(order) == 21


# Devices.


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [None, torch.float16])
async def test_a_device(directory, dtype):
    """Parameters are filled when the copies are over, not when they are queued."""
    device, module = FakeDevice(), on_meta(Net)
    real = made(Net).to(dtype or torch.float32)
    async with stio.warm_start(module, directory, device=device, dtype=dtype) as warm:
        assert module.scale.device == device.device
        with torch.no_grad():
            assert torch.equal(module.scale + 0, real.scale)
        await warm.done()
        found = dict(module.state_dict())
    require_equal(found, dict(real.state_dict()))
    del warm
    assert device.num_pending == 0


async def test_buffers_are_there_when_it_is_entered(directory):
    """A mark that the stream of the moment waits for is not enough: the forward may run on another one."""
    module, device = on_meta(Net), FakeDevice(delay_seconds=0.02)
    real = made(Net).to(torch.float16)
    expected = {name: buffer for name, buffer in real.named_buffers() if name in real.state_dict()}
    async with stio.warm_start(module, directory, device=device, dtype=torch.float16):
        found = {name: buffer.clone() for name, buffer in module.named_buffers() if name in expected}
    assert found
    require_equal(found, expected)


async def test_a_parameter_waits_for_its_copy(directory):
    device, module = FakeDevice(manual=True), on_meta(Net)
    over = threading.Event()

    def step():
        while not over.wait(0.001):
            device.step()

    with in_thread(step):
        async with stio.warm_start(module, directory, device=device):
            with in_thread(lambda: module.scale + 0) as running:
                pass
            assert torch.equal(running.outcome(), made(Net).scale)
        over.set()


# The object.


async def test_it_is_entered_once(directory):
    warm = stio.warm_start(on_meta(Net), directory)
    with pytest.raises(ClosedError, match="`with` block"):
        await warm.done()
    await warm.aclose()
    async with warm:
        pass
    await warm.aclose()
    with pytest.raises(RuntimeError, match="entered twice"):
        async with warm:
            pass


@pytest.mark.parametrize(
    ("arguments", "keywords", "error"),
    [
        (({},), {}, TypeError),
        ((nn.Linear(1, 1), "x"), {"memory": "none"}, ValueError),
        ((nn.Linear(1, 1), "x"), {"dtype": 16}, TypeError),
        ((nn.Linear(1, 1), "x"), {"dtype": "bf61"}, ValueError),
        ((nn.Linear(1, 1), "x"), {"slices": {}}, TypeError),
    ],
)
def test_wrong_arguments(arguments, keywords, error):
    for face in (stio.warm_start, sync.warm_start):
        with pytest.raises(error):
            face(*arguments, **({"source": "x"} if len(arguments) == 1 else {}), **keywords)


async def test_a_module_without_parameters(tmp_path):
    save_file({"mean": ramp(3)}, tmp_path / "m.safetensors")
    module = nn.Module()
    module.register_buffer("mean", torch.empty(3, device="meta"))
    async with stio.warm_start(module, tmp_path) as warm:
        assert torch.equal(module.mean.nan_to_num(), ramp(3).nan_to_num())
        assert await warm.done() == stio.LoadReport((), ())


async def test_the_face_after_the_block_holds_no_memory(directory):
    module = on_meta(Net)
    async with stio.warm_start(module, directory) as warm:
        pass
    gone = weakref.ref(module.scale)
    del module
    gc.collect()
    assert eventually(lambda: gone() is None)  # a thread that is about to end may have it in a frame a moment more
    assert await warm.done() == stio.LoadReport((), ())


@pytest.mark.slow
@others_are_slow
async def test_many_parameters(tmp_path):
    """Of 10,000 of them in `make nightly`, 2,000 here, which wait in any order."""
    num_modules = count(1000, 5000)

    def make():
        return nn.ModuleList(nn.Linear(2, 2) for _ in range(num_modules))

    real, module = made(make), on_meta(make)
    directory = saved(real, tmp_path)
    x = torch.rand(2)
    async with stio.warm_start(module, directory):
        with torch.inference_mode():
            for k in range(num_modules - 1, 0, -num_modules // 10):
                assert torch.equal(module[k](x), real[k](x))
    require_equal(dict(module.state_dict()), dict(real.state_dict()))


async def test_one_device_only(directory):
    module = on_meta(Net)
    with pytest.raises(ValueError, match="one device"):
        async with stio.warm_start(module, directory, device={"": "cpu"}):
            pass
    assert all(parameter.is_meta for parameter in module.parameters())
