"""Whatever way tensors come, they are bit for bit what the reference library loads, and each stands on its own."""

from __future__ import annotations

import copy
import io

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
from support import (
    assorted,
    bits_of,
    module_of,
    nothing_left,
    oracle,
    ramp,
    require_equal,
    save_file,
    save_misaligned,
    save_raw,
    save_sharded,
    trained_model,
)
from torch import nn

import stio
from stio import sync
from stio.errors import TensorNotFoundError, UnsupportedDtypeError

pytestmark = pytest.mark.anyio

MEMORY = ["auto", "map", "lazy", "copy"]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return save_file(assorted(), tmp_path_factory.mktemp("single") / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return save_sharded(assorted(), tmp_path_factory.mktemp("sharded"), 4)


@pytest.fixture(scope="module")
def misaligned(tmp_path_factory):
    tensors = {
        "a": ramp(3, dtype=torch.uint8),
        "b": ramp(5, 7),
        "c": ramp(11, dtype=torch.bfloat16),
        "d": ramp(3, dtype=torch.int64),
        "e": ramp(2, 2, dtype=torch.float64),
    }
    return save_misaligned(tensors, tmp_path_factory.mktemp("misaligned") / "model.safetensors")


@pytest.fixture(params=["single", "sharded", "misaligned"])
def source(request):
    return request.getfixturevalue(request.param)


# Equal bits.


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
async def test_load(source, memory):
    with nothing_left():
        found = await stio.load(source, memory=memory)
    require_equal(found, oracle(source))


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
def test_a_trained_model(memory):
    path = trained_model() / "model.safetensors"
    require_equal(sync.load(path, memory=memory), safetensors.torch.load_file(path))


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
async def test_stream(source, memory):
    found = {}
    with nothing_left():
        async with stio.open(source, memory=memory) as checkpoint:
            async for name, tensor in checkpoint.stream():
                assert name not in found
                found[name] = tensor
    require_equal(found, oracle(source))


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
async def test_read_one_by_one(source, memory):
    expected = oracle(source)
    with nothing_left():
        async with stio.open(source, memory=memory) as checkpoint:
            found = {name: await checkpoint.read(name) for name in checkpoint}
    require_equal(found, expected)


async def test_c64_misaligned_tensors_come_aligned(misaligned):
    for memory in MEMORY:
        for tensor in (await stio.load(misaligned, memory=memory)).values():
            assert tensor.data_ptr() % tensor.element_size() == 0


async def test_order_is_that_of_the_data(single):
    with open(single, "rb") as file:
        raw = file.read()
    offsets = {name: raw.find(bits_of(t)) for name, t in oracle(single).items() if t.nbytes > 1000}
    names = list(await stio.load(single, memory="copy"))
    stored = [name for name in names if name in offsets]
    assert stored == sorted(stored, key=offsets.__getitem__)
    async with stio.open(single) as checkpoint:
        assert checkpoint.keys() == names


SLICES = [
    np.s_[0:128, :],
    np.s_[5],
    np.s_[-1],
    np.s_[..., 3],
    np.s_[10:200:7],
    np.s_[3:3],
    np.s_[:, 10:20],
    np.s_[::-1],
    np.s_[250:20:-3, ::2],
    (),
    np.s_[...],
    [5, 1, 5],
    np.s_[:, None],
    np.s_[-50:, -5:],
]


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
async def test_slices_are_what_numpy_picks(source, memory):
    expected = oracle(source)
    if "large" not in expected:
        expected, name = oracle(source), "b"
    else:
        name = "large"
    whole = expected[name].view(torch.uint16 if name == "large" else torch.float32).numpy()
    async with stio.open(source, memory=memory) as checkpoint:
        for index in SLICES:
            try:
                wanted = whole[index]
            except IndexError:
                with pytest.raises(IndexError):
                    await checkpoint.read(name, index)
                continue
            part = await checkpoint.read(name, index)
            assert part.dtype == expected[name].dtype
            assert tuple(part.shape) == wanted.shape, index
            assert bits_of(part) == np.ascontiguousarray(wanted).tobytes(), index
            assert part.untyped_storage().nbytes() == part.nbytes, index


@pytest.mark.parametrize("memory", MEMORY)
async def test_several_intervals_in_one_request(sharded, memory):
    whole = oracle(sharded)["large"]
    rows, columns = [slice(3, 7), slice(90, 93)], [slice(6, 9), slice(0, 2), slice(7, 9)]
    wanted = {"rows": torch.cat([whole[part] for part in rows])}
    wanted["columns"] = torch.cat([whole[:, part] for part in columns], 1)
    wanted["both"] = torch.cat([wanted["rows"][:, part] for part in columns], 1)
    for name, index in {"rows": rows, "columns": (slice(None), columns), "both": (rows, columns)}.items():
        found = (await stio.load(sharded, memory=memory, names="large", slices={"large": index}))["large"]
        assert torch.equal(found, wanted[name]), name
        assert found.untyped_storage().nbytes() == found.nbytes


async def test_slices_of_a_load_and_of_a_stream(sharded):
    expected = oracle(sharded)
    slices = {"large": np.s_[7:9], "dtype.float32": np.s_[:, 1]}
    expected["large"] = expected["large"][7:9]
    expected["dtype.float32"] = expected["dtype.float32"][:, 1]
    require_equal(await stio.load(sharded, slices=slices), expected)
    async with stio.open(sharded) as checkpoint:
        require_equal({name: t async for name, t in checkpoint.stream(slices=slices)}, expected)
        require_equal(await checkpoint.load(["large"], slices), {"large": expected["large"]})


async def test_two_parts_of_one_tensor_are_refused(tmp_path):
    w = torch.arange(12.0).reshape(4, 3)
    await stio.save({"w": w, "tied": w}, tmp_path / "model")
    found = await stio.load(tmp_path / "model", slices={"w": np.s_[:2], "tied": np.s_[:2]})
    assert found["w"] is found["tied"]
    assert torch.equal(found["w"], w[:2])
    for part in (np.s_[2:], [slice(0, 1)], np.array([0, 1])):
        with pytest.raises(ValueError, match="two different parts of one tensor"):
            await stio.load(tmp_path / "model", slices={"w": np.s_[:2], "tied": part})


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
async def test_names(source, memory):
    expected = oracle(source)
    names = list(expected)
    one, some = names[0], names[1::2]
    require_equal(await stio.load(source, names=one, memory=memory), {one: expected[one]})
    for selected in [
        some,
        tuple(some),
        set(some),
        (name for name in some),
        dict.fromkeys(some),
        lambda name: name in some,
    ]:
        found = await stio.load(source, names=selected, memory=memory)
        require_equal(found, {name: expected[name] for name in some})
    assert await stio.load(source, names=[], memory=memory) == {}
    assert await stio.load(source, names=lambda _: False, memory=memory) == {}
    require_equal(await stio.load(source, names=[one, one], memory=memory), {one: expected[one]})
    async with stio.open(source, memory=memory) as checkpoint:
        found = {name: t async for name, t in checkpoint.stream(name for name in some)}
        require_equal(found, {name: expected[name] for name in some})
        assert [pair async for pair in checkpoint.stream([])] == []


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
async def test_dtype_casts_what_floats(single, memory, dtype):
    expected = oracle(single)
    found = await stio.load(single, dtype=dtype, memory=memory)
    for name, tensor in expected.items():
        is_scale = "float8_e8m0fnu" in str(tensor.dtype)  # 401: never cast
        wanted = tensor.to(dtype) if tensor.is_floating_point() and not is_scale else tensor
        assert found[name].dtype == wanted.dtype
        assert bits_of(found[name]) == bits_of(wanted), name
        assert found[name].untyped_storage().nbytes() == found[name].nbytes


@pytest.mark.parametrize("name", ["float16", "F16", "f16", "torch.float16"])
async def test_a_dtype_by_its_name(single, name):
    expected = await stio.load(single, dtype=torch.float16)
    require_equal(await stio.load(single, dtype=name), expected)
    async with stio.open(single, dtype=name) as checkpoint:
        require_equal(await checkpoint.load(), expected)
        require_equal({name: tensor async for name, tensor in checkpoint.stream()}, expected)


async def test_an_unknown_dtype_is_refused_at_the_call(tmp_path):
    with pytest.raises(ValueError, match="'bfloat16' or 'BF16'.*did you mean 'F16'"):
        await stio.load(tmp_path / "absent", dtype="FP16")
    for dtype in (16, float, int, str):  # a class is callable, and no function of a name
        with pytest.raises(TypeError, match="takes a torch.dtype or the name of one"):
            stio.open(tmp_path / "absent", dtype=dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
async def test_load_into_every_dtype(source, memory):
    expected = oracle(source)
    module = module_of({name: torch.zeros_like(tensor) for name, tensor in expected.items()})
    report = await stio.load_into(module, source, memory=memory)
    assert (report.missing, report.unexpected) == ((), ())
    require_equal(dict(module.named_buffers()), expected)


@pytest.mark.parametrize("memory", MEMORY)
async def test_f4_pairs_and_f6_only_as_metadata(tmp_path, memory):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4")
    header = {
        "f4": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]},
        "f6": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [4, 7]},
    }
    file = save_raw(tmp_path / "x.safetensors", header, b"\x12\x34\x56\x78abc")
    tensor = (await stio.load(file, names="f4", memory=memory))["f4"]
    assert tensor.dtype == torch.float4_e2m1fn_x2
    assert tuple(tensor.shape) == (2, 2)
    assert bits_of(tensor.view(torch.uint8)) == b"\x12\x34\x56\x78"
    with pytest.raises(UnsupportedDtypeError, match="F6_E2M3"):
        await stio.load(file, memory=memory)
    async with stio.open(file, memory=memory) as checkpoint:
        assert checkpoint.info("f6").dtype == "F6_E2M3"


@pytest.mark.parametrize("memory", MEMORY)
async def test_file_without_tensors(tmp_path, memory):
    file = save_file({}, tmp_path / "x.safetensors", {"a": "b"})
    assert await stio.load(file, memory=memory) == {}
    async with stio.open(file, memory=memory) as checkpoint:
        assert (len(checkpoint), checkpoint.keys(), checkpoint.metadata) == (0, [], {"a": "b"})
        assert [pair async for pair in checkpoint.stream()] == []


@pytest.mark.slow
async def test_many_small_tensors(tmp_path):
    tensors = {f"t{k}": ramp(3, start=k) for k in range(3000)}
    file = save_file(tensors, tmp_path / "x.safetensors")
    for memory in MEMORY:
        require_equal(await stio.load(file, memory=memory), tensors)


async def test_two_tasks_load_one_path(sharded):
    """C101: identical, and nothing shared but the page cache."""
    import anyio

    found = []

    async def one(memory):
        found.append(await stio.load(sharded, memory=memory))

    with nothing_left():
        async with anyio.create_task_group() as group:
            for memory in MEMORY * 2:
                group.start_soon(one, memory)
    assert len(found) == 8
    for tensors in found:
        require_equal(tensors, oracle(sharded))
    found[0]["large"].zero_()
    for tensors in found[1:]:
        require_equal(tensors, oracle(sharded))


# Each tensor on its own.


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
async def test_storages_are_exactly_a_tensor_each(source, memory):
    tensors = await stio.load(source, memory=memory)
    for name, tensor in tensors.items():
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert not tensor.is_inference()
        assert not tensor.requires_grad
    places = [t.untyped_storage().data_ptr() for t in tensors.values() if t.nbytes]
    assert len(set(places)) == len(places)


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
async def test_the_hubs_splitter_sees_no_sharing(source, memory):
    # Empty tensors have no storage to tell apart: the hub takes those of `torch.empty` for one, too.
    tensors = {name: tensor for name, tensor in (await stio.load(source, memory=memory)).items() if tensor.nbytes}
    split = huggingface_hub.split_torch_state_dict_into_shards(tensors, max_shard_size=1000)
    reference = huggingface_hub.split_torch_state_dict_into_shards(
        {name: oracle(source)[name] for name in tensors}, max_shard_size=1000
    )
    assert split == reference
    assert split.metadata["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("memory", MEMORY)
async def test_torch_save_writes_a_tensors_bytes_alone(single, memory):
    tensors = await stio.load(single, memory=memory)
    for name in ["dtype.bfloat16", "scalar", "large"]:
        buffer = io.BytesIO()
        torch.save(tensors[name], buffer)
        assert len(buffer.getvalue()) < tensors[name].nbytes + 3000
        buffer.seek(0)
        assert bits_of(torch.load(buffer)) == bits_of(tensors[name])
    duplicate = copy.deepcopy(tensors["large"])
    assert bits_of(duplicate) == bits_of(tensors["large"])


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("assign", [False, True])
async def test_save_model_of_a_module_loaded_by_stio(tmp_path, memory, assign):
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    source = save_file(dict(module.state_dict()), tmp_path / "in.safetensors")
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    await stio.load_into(other, source, memory=memory, assign=assign)
    safetensors.torch.save_model(other, str(tmp_path / "out.safetensors"))
    require_equal(oracle(tmp_path / "out.safetensors"), oracle(source))


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORY)
async def test_version_counters_are_separate(source, memory):
    """Autograd refuses a backward through a tensor that was edited, and only that one."""
    tensors = await stio.load(source, memory=memory)
    name = "dtype.float32" if "dtype.float32" in tensors else "b"
    weight = tensors[name]
    versions = {other: t._version for other, t in tensors.items()}
    x = torch.ones_like(weight, requires_grad=True)
    product = x * weight
    for other, tensor in tensors.items():
        if other != name and tensor.nbytes:
            tensor.zero_()
    product.nan_to_num().sum().backward()
    assert tensors[name]._version == versions[name]
    product = x * weight
    weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("memory", MEMORY)
async def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path, memory):
    file = save_file({"a": ramp(5000), "b": ramp(5000, start=3)}, tmp_path / "x.safetensors")
    before = file.read_bytes()
    tensors = await stio.load(file, memory=memory)
    b = bits_of(tensors["b"])
    tensors["a"].fill_(7)
    assert bits_of(tensors["b"]) == b
    assert file.read_bytes() == before
    assert bits_of((await stio.load(file, memory=memory))["a"]) != bits_of(tensors["a"])


# The blocking twins.


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:stio.sync blocks:RuntimeWarning")
@pytest.mark.parametrize("memory", MEMORY)
async def test_sync_twins_under_a_loop_give_the_same(source, memory):
    expected = oracle(source)
    with nothing_left():
        require_equal(sync.load(source, memory=memory), expected)
        with sync.open(source, memory=memory) as checkpoint:
            require_equal(checkpoint.load(), expected)
            require_equal(dict(checkpoint.stream()), expected)
            require_equal({name: checkpoint.read(name) for name in checkpoint}, expected)
            with pytest.raises(TensorNotFoundError):
                checkpoint.read("absent")
