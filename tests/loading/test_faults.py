"""Storage that fails while it is read, and calls that are wrong: class, errno, message, and nothing left."""

from __future__ import annotations

import errno
import math
import os

import anyio
import pytest
import torch
from support import HookedRoot, module_of, nothing_left, oracle, ramp, require_equal, save_file, save_raw, save_sharded
from torch import nn

import stio
from stio import sync
from stio.errors import (
    AmbiguousCheckpointError,
    ChangedDuringReadError,
    CheckpointNotFoundError,
    DeviceError,
    MismatchError,
    SliceError,
    StioError,
    StorageError,
    TensorNotFoundError,
    TruncatedError,
    UnsupportedDtypeError,
)
from stio.runtime import memory as memory_module

pytestmark = pytest.mark.anyio

KIB = 1 << 10
SMALL = {"memory": "copy", "budget_bytes": 64 * KIB}


@pytest.fixture
def tensors():
    return {f"layer.{k}": ramp(64, 64 + k) for k in range(12)}


@pytest.fixture
def directory(tmp_path, tensors):
    return save_sharded(tensors, tmp_path / "model", 3)


@pytest.fixture
def root(directory):
    root = HookedRoot(directory)
    yield root
    root.close()


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


async def by_load(source, **keywords):
    return await stio.load(source, **keywords)


async def by_stream(source, **keywords):
    async with stio.open(source, **keywords) as checkpoint:
        return {name: tensor async for name, tensor in checkpoint.stream()}


async def by_load_into(source, **keywords):
    module = module_of({f"layer.{k}": torch.zeros(64, 64 + k) for k in range(12)})
    return await stio.load_into(module, source, **keywords)


@pytest.fixture(params=[by_load, by_stream, by_load_into], ids=lambda by: by.__name__)
def by(request):
    return request.param


class FailAt:
    """Raises at the n-th read of data."""

    def __init__(self, n, error):
        self.left, self.error, self.reached = n, error, False

    def __call__(self, name, offset, nbytes):
        self.left -= 1
        if self.left < 0:
            self.reached = True
            raise self.error


@pytest.mark.matrix
async def test_c89_eio_at_every_read(root, by):
    for n in range(100):
        root.hook = hook = FailAt(n, StorageError("reading failed", errno=errno.EIO, path="x", offset=n))
        with nothing_left():
            try:
                await by(root, **SMALL)
            except StorageError as error:
                assert error.errno == errno.EIO
                assert error is hook.error
            assert all(file.closed for file in root.files)
        if not hook.reached:
            break
    assert n > 10
    assert not any(file.inside for file in root.files)


@pytest.mark.matrix
@pytest.mark.usefixtures("plain_executor")
async def test_c89_eio_of_a_map(directory, by, monkeypatch):
    for n in range(20):
        left = [n]

        def populate(region, left=left, **_):
            left[0] -= 1
            return errno.EIO if left[0] < 0 else 0

        monkeypatch.setattr(memory_module, "populate", populate)
        with nothing_left():
            try:
                await by(directory, memory="map")
            except StorageError as error:
                assert error.errno == errno.EIO
                assert str(directory) in str(error)
        if left[0] >= 0:
            break
    assert n >= 3


@pytest.mark.parametrize("memory", ["copy", "map"])
async def test_c90_cut_after_it_was_opened(directory, memory):
    async with stio.open(directory, memory=memory) as checkpoint:
        last = directory / "model-00003-of-00003.safetensors"
        os.truncate(last, last.stat().st_size - 5000)
        with pytest.raises(TruncatedError) as caught:
            async for _ in checkpoint.stream():
                pass
        assert caught.value.path == str(last)
        assert caught.value.offset is not None
        with pytest.raises(TruncatedError):
            await checkpoint.load()


async def test_c90_cut_while_it_is_read(root, directory, by):
    cut = []

    def hook(name, offset, nbytes):
        if len(cut) == 0:
            for file in directory.glob("*.safetensors"):
                os.truncate(file, 3000)
            cut.append(name)

    root.hook = hook
    with pytest.raises(TruncatedError):
        await by(root, **SMALL)


@pytest.mark.parametrize("memory", ["copy", "map", "lazy"])
async def test_c91_rewritten_while_it_is_read(directory, memory):
    async with stio.open(directory, memory=memory) as checkpoint:
        shard = directory / "model-00002-of-00003.safetensors"
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(shard, ns=(1, 1))
        with pytest.raises(ChangedDuringReadError) as caught:
            await checkpoint.load()
        assert caught.value.path == str(shard)
        require_equal(await checkpoint.load("layer.0"), {"layer.0": oracle(directory)["layer.0"]})


@pytest.mark.parametrize("change", [("F32", "I32"), ("[64, 64]", "[32,128]")])
@pytest.mark.parametrize("memory", ["copy", "map", "lazy"])
async def test_b86_a_header_that_changes_between_plan_and_read(tmp_path, memory, change):
    """A writer gives the bytes in place another dtype or shape. Only the time of the change shows that."""
    data = bytes(64 * 64 * 4)
    header = '{"a": {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, 16384]}}'
    file = save_raw(tmp_path / "x.safetensors", header, data)
    async with stio.open(file, memory=memory) as checkpoint:
        save_raw(file, header.replace(*change), data)
        os.utime(file, ns=(1, 1))
        with pytest.raises(ChangedDuringReadError) as caught:
            await checkpoint.load()
        assert caught.value.path == str(file)
    assert len(await stio.load(file, memory=memory)) == 1


async def test_c91_rewritten_during_a_load(root, directory, by):
    def hook(name, offset, nbytes):
        os.utime(directory / name, ns=(5, 5))

    root.hook = hook
    with pytest.raises(ChangedDuringReadError):
        await by(root, **SMALL)


async def test_c91_replaced_by_a_rename_is_the_old_file_to_the_end(directory, tensors):
    expected = {name: tensor.clone() for name, tensor in oracle(directory).items()}
    async with stio.open(directory, memory="copy") as checkpoint:
        for file in directory.glob("*.safetensors"):
            other = save_file({name: torch.zeros(3) for name in tensors}, directory / "tmp")
            other.rename(file)
        require_equal(await checkpoint.load(), expected)


async def test_c98_direct_reads_that_are_refused(tmp_path, monkeypatch):
    """/dev/shm refuses nothing that matters here: what is read is the same either way."""
    from stio.storage.local import LocalFile

    file = save_file({"a": ramp(3000, 2000)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(LocalFile, "resident_fraction", lambda self: 0.0)
    require_equal(await stio.load(file, memory="copy"), oracle(file))
    monkeypatch.setattr(LocalFile, "use_direct", lambda self: False)
    require_equal(await stio.load(file, memory="copy"), oracle(file))


# Wrong input, said before anything large is read.


async def wrong(error, source, *parts, **keywords):
    with pytest.raises(error) as caught:
        await stio.load(source, **keywords)
    assert isinstance(caught.value, StioError)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert not isinstance(source, HookedRoot) or source.data_bytes_read == 0
    return caught.value


async def test_directory_without_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    await wrong(
        CheckpointNotFoundError, tmp_path, str(tmp_path), "config.json", "give a directory with .safetensors files"
    )
    await wrong(CheckpointNotFoundError, tmp_path / "absent")


async def test_two_candidates(tmp_path, tensors):
    for name in "ab":
        save_file(tensors, tmp_path / f"{name}.safetensors")
    await wrong(AmbiguousCheckpointError, tmp_path, "a.safetensors, b.safetensors", "give the path of the one you mean")


async def test_missing_name(root):
    await wrong(TensorNotFoundError, root, "'layer.1'", "did you mean", names=["layer.0", "layer.1."])
    await wrong(TensorNotFoundError, root, "others", names="zzz")
    await wrong(TensorNotFoundError, root, "slices=", slices={"zzz": 1})
    await wrong(SliceError, root, "layer.3", slices={"layer.3": (0, 0, 0)})
    await wrong(SliceError, root, slices={"layer.3": 64})


async def test_dtype_that_torch_lacks(tmp_path):
    save_raw(
        tmp_path / "x.safetensors",
        {
            "f6": {"dtype": "F6_E3M2", "shape": [4], "data_offsets": [0, 3]},
            "u8": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]},
        },
        b"abcd",
    )
    root = HookedRoot(tmp_path)
    await wrong(UnsupportedDtypeError, root, "F6_E3M2", "names=")
    root.close()
    assert (await stio.load(tmp_path, names="u8"))["u8"].tolist() == [ord("d")]


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "mps", "nonsense", 99, "meta", object()])
async def test_device_that_is_not_there(root, device):
    if torch.accelerator.is_available() and "cuda" in str(device):
        pytest.skip("it is there")
    error = await wrong(DeviceError, root, device=device)
    assert error.requested is not None
    assert root.log == []


async def test_module_whose_shapes_differ(root):
    module = nn.Module()
    module.layer = nn.ParameterList([torch.zeros(64, 64 + k) for k in range(11)] + [torch.zeros(2, 3)])
    with pytest.raises(
        MismatchError, match=r"layer.11 is \[64, 75\] in the checkpoint, \[2, 3\] in the module"
    ) as caught:
        await stio.load_into(module, root)
    assert str(root.path) in str(caught.value)
    assert root.data_bytes_read == 0
    with pytest.raises(MismatchError):
        await stio.load_into(module, root, strict=False)
    assert root.data_bytes_read == 0


async def test_paths_of_every_kind(tmp_path):
    """Equal basenames in different roots, spaces, other scripts, quotes, a newline."""
    sources = {}
    for k, name in enumerate(
        ["a", "b", "with space", "ünïcode 名前", "quote'\"", "new\nline", "-dash", "%41", "x" * 200]
    ):
        sources[tmp_path / name / "model.safetensors"] = {"w": ramp(4, start=k)}
    for path, tensors in sources.items():
        save_file(tensors, path)
    for path, tensors in sources.items():
        require_equal(await stio.load(path), tensors)
        require_equal(await stio.load(path.parent), tensors)
    found = {}

    async def one(path):
        found[path] = await stio.load(str(path))

    async with anyio.create_task_group() as group:
        for path in sources:
            group.start_soon(one, path)
    for path, tensors in sources.items():
        require_equal(found[path], tensors)
    error = await wrong(CheckpointNotFoundError, tmp_path / "new\nline" / "absent")
    assert "\n" not in str(error)


async def test_a_path_that_is_not_utf8(tmp_path, tensors):
    path = os.fsencode(tmp_path) + b"/caf\xe9.safetensors"
    with open(path, "wb") as file:
        file.write(save_file(tensors, tmp_path / "x.safetensors").read_bytes())
    require_equal(await stio.load(path), tensors)
    os.unlink(path)
    error = await wrong(CheckpointNotFoundError, path)
    str(error).encode()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"memory": "x"}, ValueError),
        ({"memory": None}, ValueError),
        ({"budget_bytes": 0}, ValueError),
        ({"budget_bytes": -5}, ValueError),
        ({"budget_bytes": "1 GBit"}, ValueError),
        ({"dtype": 16}, TypeError),
        ({"dtype": "float61"}, ValueError),
        ({"progress": "yes"}, TypeError),
        ({"switch_interval": 0}, ValueError),
        ({"switch_interval": -1.0}, ValueError),
        ({"switch_interval": math.nan}, ValueError),
        ({"strict": "no"}, TypeError),
        ({"follow_symlinks": "false"}, TypeError),
        ({"limits": 5}, TypeError),
        ({"trace": True}, TypeError),
        ({"colour": "red"}, TypeError),
    ],
    ids=str,
)
async def test_wrong_keywords_at_the_call(directory, keywords, error, monkeypatch):
    monkeypatch.setattr(sync, "_warned", True)
    for call in [stio.open, sync.open, sync.load]:
        with pytest.raises(error, match=next(iter(keywords))):
            call(directory, **keywords)
    with pytest.raises(error):
        await stio.load(directory, **keywords)
    with pytest.raises(error):
        await stio.load_into(nn.Linear(1, 1), directory, **keywords)


@pytest.mark.parametrize("source", [None, 5, object(), ["a"]])
async def test_what_is_no_path(source):
    with pytest.raises(TypeError):
        await stio.load(source)


async def test_a_nul_in_a_path():
    with pytest.raises((StorageError, CheckpointNotFoundError)):
        await stio.load("a\0b")
