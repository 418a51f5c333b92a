"""`verify=True`: every file is compared with the manifest before a tensor is returned (fault 102)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading

import anyio
import pytest
import torch
from support import (
    INDEX,
    Gate,
    HookedRoot,
    cancelled_at_every_await,
    cancelled_natively_at_every_await,
    eventually,
    eventually_async,
    module_of,
    nothing_left,
    oracle,
    ramp,
    require_equal,
    save_file,
    save_sharded,
    spin,
)

import stio
from stio import sync
from stio.errors import (
    ChangedDuringReadError,
    ClosedError,
    FormatError,
    IntegrityError,
    LimitError,
    MismatchError,
    StorageError,
    UnsafePathError,
)
from stio.runtime.workers import WorkerPool
from stio.storage import async_files
from stio.storage.local import LocalRoot

pytestmark = pytest.mark.anyio

KIB = 1 << 10
SHARD = "model-00002-of-00003.safetensors"
MANIFEST = "model.safetensors.manifest.json"


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


@pytest.fixture
def tensors():
    return {f"layer.{k}": ramp(64, 64 + k) for k in range(12)}


def state(content, algorithm="sha256"):
    if algorithm == "xxh3":
        digest = pytest.importorskip("xxhash").xxh3_128_hexdigest(content)
    else:
        digest = hashlib.sha256(content).hexdigest()
    return {"nbytes": len(content), "digest": digest}


def manifest_of(directory, algorithm="sha256"):
    """Return what a save would note of the files that are there."""
    files = {path.name: [state(path.read_bytes(), algorithm)] for path in directory.glob("*.safetensors")}
    return {"version": 1, "algorithm": algorithm, "files": files}


def write_manifest(directory, content=None, name=MANIFEST):
    (directory / name).write_text(json.dumps(manifest_of(directory) if content is None else content))


@pytest.fixture
def directory(tmp_path, tensors):
    directory = save_sharded(tensors, tmp_path / "model", 3)
    write_manifest(directory)
    return directory


@pytest.fixture
def root(directory):
    root = HookedRoot(directory)
    yield root
    root.close()


def zeros():
    """Return a module of the checkpoint's names and shapes, and its tensors."""
    tensors = {f"layer.{k}": torch.zeros(64, 64 + k) for k in range(12)}
    return module_of(tensors), tensors


async def by_load(source, **keywords):
    return await stio.load(source, **keywords)


async def by_open(source, **keywords):
    async with stio.open(source, **keywords) as checkpoint:
        return await checkpoint.load()


async def by_stream(source, **keywords):
    async with stio.open(source, **keywords) as checkpoint:
        return {name: tensor async for name, tensor in checkpoint.stream()}


async def by_load_into(source, **keywords):
    model, tensors = zeros()
    try:
        await stio.load_into(model, source, **keywords)
    except IntegrityError:
        assert not any(tensor.any() for tensor in tensors.values())  # nothing was read
        raise
    return tensors


async def by_context_load_into(source, **keywords):
    model, tensors = zeros()
    async with stio.open(source, **keywords) as checkpoint:
        await checkpoint.load_into(model)
    return tensors


async def by_sync_load(source, **keywords):
    return await anyio.to_thread.run_sync(lambda: sync.load(source, **keywords))


async def by_sync_open(source, **keywords):
    def run():
        with sync.open(source, **keywords) as checkpoint:
            return dict(checkpoint.stream())

    return await anyio.to_thread.run_sync(run)


async def by_sync_load_into(source, **keywords):
    model, tensors = zeros()
    await anyio.to_thread.run_sync(lambda: sync.load_into(model, source, **keywords))
    return tensors


WAYS = [
    *(by_load, by_open, by_stream, by_load_into, by_context_load_into),
    *(by_sync_load, by_sync_open, by_sync_load_into),
]


@pytest.fixture(params=WAYS, ids=lambda by: by.__name__)
def by(request):
    return request.param


# What is as it should be.


@pytest.mark.matrix
async def test_verified(directory, tensors, by):
    require_equal(await by(directory, verify=True), tensors)


SOURCES = {
    "Path": lambda d: d,
    "slash": lambda d: str(d) + "/",
    "index": lambda d: d / INDEX,
    "bytes": os.fsencode,
    "relative": os.path.relpath,
    "Root": HookedRoot,
    "LocalRoot": LocalRoot,
    "aiofiles": lambda directory: LocalRoot(directory, open_at=async_files.open_at),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", SOURCES)
async def test_sources(directory, tensors, kind):
    source = SOURCES[kind](directory)
    require_equal(await stio.load(source, verify=True), tensors)
    damage(directory / SHARD)
    with pytest.raises(IntegrityError):
        await stio.load(source, verify=True)
    if isinstance(source, HookedRoot | LocalRoot):
        source.close()


@pytest.mark.parametrize("of", ["file", "directory"])
@pytest.mark.parametrize("name", ["model.safetensors", "other x ü.safetensors"])
async def test_single_files(tmp_path, tensors, of, name):
    folder = tmp_path / "one"
    path = save_file(tensors, folder / name)
    write_manifest(folder, name=f"{name}.manifest.json")
    source = path if of == "file" else folder
    require_equal(await stio.load(source, verify=True), tensors)
    damage(path)
    with pytest.raises(IntegrityError):
        await stio.load(source, verify=True)


async def test_a_file_in_the_working_directory(tmp_path, tensors, monkeypatch):
    save_file(tensors, tmp_path / "m.safetensors")
    write_manifest(tmp_path, name="m.safetensors.manifest.json")
    monkeypatch.chdir(tmp_path)
    require_equal(await stio.load("m.safetensors", verify=True), tensors)


async def test_a_link_to_a_file(tmp_path, tensors):
    """A save follows the link; so its manifest stands beside the target, and speaks of the target's name."""
    path = save_file(tensors, tmp_path / "there" / "m.safetensors")
    write_manifest(path.parent, name="m.safetensors.manifest.json")
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    require_equal(await stio.load(link, verify=True), tensors)
    damage(path)
    with pytest.raises(IntegrityError):
        await stio.load(link, verify=True)


async def test_a_hub_cache(tmp_path, tensors, directory):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(directory.iterdir()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    require_equal(await stio.load(snapshot, verify=True), tensors)


async def test_another_pattern(tmp_path, tensors):
    folder = save_sharded(tensors, tmp_path / "x", 2)
    (folder / INDEX).rename(folder / "diffusion.safetensors.index.json")
    write_manifest(folder, name="diffusion.safetensors.manifest.json")
    require_equal(await stio.load(folder, verify=True), tensors)


async def test_xxh3(directory, tensors):
    write_manifest(directory, manifest_of(directory, "xxh3"))
    require_equal(await stio.load(directory, verify=True), tensors)
    damage(directory / SHARD)
    with pytest.raises(IntegrityError, match="its xxh3 differs from the manifest"):
        await stio.load(directory, verify=True)


async def test_xxh3_without_its_package(root, directory, monkeypatch):
    write_manifest(directory, manifest_of(directory, "xxh3"))
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r"pip install 'stio-torch\[hash\]'"):
        await stio.load(root, verify=True)
    assert root.data_bytes_read == 0


async def test_every_state_of_a_name_is_acceptable(directory, tensors):
    """While a save replaces a file, the manifest names the old and the new one."""
    content = manifest_of(directory)
    other = state(b"another file altogether")
    longer = state((directory / SHARD).read_bytes() + b"x")
    content["files"][SHARD] = [other, *content["files"][SHARD], longer]
    content["files"]["gone.safetensors"] = [other]
    write_manifest(directory, content)
    require_equal(await stio.load(directory, verify=True), tensors)
    damage(directory / SHARD)
    with pytest.raises(IntegrityError):
        await stio.load(directory, verify=True)


async def test_an_empty_checkpoint(tmp_path):
    save_file({}, tmp_path / "m.safetensors")
    write_manifest(tmp_path, name="m.safetensors.manifest.json")
    assert await stio.load(tmp_path, verify=True) == {}


@pytest.mark.matrix
async def test_nothing_is_hashed_unasked(root, directory, tensors, by):
    damage(directory / SHARD)
    (directory / MANIFEST).write_text("not a manifest")
    require_equal(await by(root), oracle(directory))
    assert MANIFEST not in {name for name, _, _ in root.log}


async def test_the_span_of_a_trace(directory):
    trace = stio.Trace()
    await stio.load(directory, verify=True, trace=trace)
    assert [span.name for span in trace.spans][:2] == ["open", "verify"]


@pytest.mark.parametrize("value", [1, None, "sha256"])
def test_wrong_values(directory, value):
    with pytest.raises(TypeError, match="verify= takes True or False"):
        stio.open(directory, verify=value)


# What is not.


def damage(path, at=-5):
    """Flip one bit; size and name stay."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.matrix
async def test_c102_one_bit(directory, by):
    good = state((directory / SHARD).read_bytes())["digest"]
    damage(directory / SHARD)
    with pytest.raises(IntegrityError, match="its sha256 differs from the manifest") as caught:
        await by(directory, verify=True)
    assert caught.value.path == str(directory / SHARD)
    assert caught.value.expected == good
    assert caught.value.found == state((directory / SHARD).read_bytes())["digest"]


async def test_c102_tensors_are_withheld(root, directory):
    """Not even those of good shards, nor those that were asked for from them."""
    damage(directory / SHARD)
    delivered = []
    for names in (None, ["layer.0"], []):
        with pytest.raises(IntegrityError):
            await stio.load(root, names=names, verify=True, progress=delivered.append)
        async with anyio.create_task_group():
            with pytest.raises(IntegrityError):
                async with stio.open(root, verify=True, progress=delivered.append) as checkpoint:
                    delivered.append(checkpoint)
    assert delivered == []
    assert all(file.closed for file in root.files)


async def test_c102_a_checkpoint_that_failed_can_be_tried_again(directory, tensors):
    damage(directory / SHARD)
    checkpoint = stio.open(directory, verify=True)
    with pytest.raises(IntegrityError):
        await checkpoint.__aenter__()
    with pytest.raises(ClosedError):
        checkpoint.keys()
    damage(directory / SHARD)
    async with checkpoint:
        require_equal(await checkpoint.load(), tensors)


@pytest.mark.matrix
@pytest.mark.parametrize("at", [-1, 9, 100])
@pytest.mark.parametrize("shard", range(3))
async def test_c102_any_byte_of_any_shard(tmp_path, at, shard):
    """Spaces for the header's padding are as good as the data: the digest is that of the whole file."""
    tensors = {f"layer.{k}": ramp(64 + k) for k in range(6)}
    directory = save_sharded(tensors, tmp_path / "m", 3)
    content = manifest_of(directory)
    name = f"model-{shard + 1:05}-of-00003.safetensors"
    content["files"][name][0]["digest"] = "0" * 64
    write_manifest(directory, content)
    with pytest.raises(IntegrityError) as caught:
        await stio.load(directory, verify=True)
    assert caught.value.path == str(directory / name)


async def test_c102_metadata_count(tmp_path, tensors):
    """A header that still parses is no excuse."""
    path = save_file(tensors, tmp_path / "m.safetensors", metadata={"note": "aaaa"})
    write_manifest(tmp_path, name="m.safetensors.manifest.json")
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"aaab", 1))
    with pytest.raises(IntegrityError):
        await stio.load(path, verify=True)


async def test_another_size_is_known_before_anything_is_read(root, directory):
    content = manifest_of(directory)
    content["files"][SHARD][0]["nbytes"] += 1
    content["files"][SHARD].append({"nbytes": 3, "digest": "0" * 64})
    write_manifest(directory, content)
    found = (directory / SHARD).stat().st_size
    with pytest.raises(IntegrityError, match="another size") as caught:
        await stio.load(root, verify=True)
    assert (caught.value.expected, caught.value.found) == (f"{found + 1} or 3", found)
    assert root.data_bytes_read == 0


async def test_a_file_that_the_manifest_does_not_name(root, directory):
    content = manifest_of(directory)
    del content["files"][SHARD]
    write_manifest(directory, content)
    with pytest.raises(IntegrityError, match="does not name this file") as caught:
        await stio.load(root, verify=True)
    assert caught.value.path == str(directory / SHARD)
    assert caught.value.found == str(directory / MANIFEST)
    assert root.data_bytes_read == 0


@pytest.mark.matrix
async def test_no_manifest(directory, by):
    (directory / MANIFEST).unlink()
    with pytest.raises(IntegrityError, match="no manifest.*a save makes one with hash='sha256'") as caught:
        await by(directory, verify=True)
    assert caught.value.path == str(directory)
    assert caught.value.expected == MANIFEST


async def test_no_manifest_beside_a_file(tmp_path, tensors):
    path = save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(IntegrityError) as caught:
        await stio.load(path, verify=True)
    assert (caught.value.path, caught.value.expected) == (str(path), "m.safetensors.manifest.json")


@pytest.mark.matrix
async def test_a_malformed_manifest(directory, by):
    (directory / MANIFEST).write_text("{}")
    with pytest.raises(FormatError, match="incomplete") as caught:
        await by(directory, verify=True)
    assert caught.value.path == str(directory / MANIFEST)


async def test_an_endless_manifest_is_not_read(directory):
    with open(directory / MANIFEST, "wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(LimitError, match="the manifest is too long"):
        await stio.load(directory, verify=True)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("kind", ["fifo", "directory", "link out", "device"])
async def test_a_manifest_that_is_no_file(tmp_path, directory, kind):
    manifest = directory / MANIFEST
    outside = manifest.rename(tmp_path / "outside.json")
    if kind == "fifo":
        os.mkfifo(manifest)
    elif kind == "directory":
        manifest.mkdir()
    else:
        manifest.symlink_to(outside if kind == "link out" else "/dev/zero")
    expected = StorageError if kind in ("fifo", "directory") else UnsafePathError
    with pytest.raises(expected):
        await stio.load(directory, verify=True)


async def test_names_are_compared_before_anything_is_hashed(root):
    with pytest.raises(MismatchError):
        await stio.load_into(module_of({"other": torch.zeros(1)}), root, verify=True)
    assert root.data_bytes_read == 0


# A save that commits meanwhile.


class SwappingRoot(HookedRoot):
    """Puts other content in place of the manifest when a shard is opened."""

    def __init__(self, directory, swap):
        super().__init__(directory)
        self._swap = swap

    def open(self, name, *, trusted=False):
        if name.endswith(".safetensors"):
            self._swap()
        return super().open(name, trusted=trusted)


@pytest.mark.parametrize("generation", ["old", "new"])
async def test_a_manifest_that_changes_while_files_are_opened(directory, tensors, generation):
    """Old files and the new manifest, or new ones that only the new manifest names: both were a checkpoint once."""
    good, other = manifest_of(directory), manifest_of(directory)
    for states in other["files"].values():
        states[0]["digest"] = "0" * 64
    first, then = (good, other) if generation == "old" else (other, good)
    write_manifest(directory, first)
    root = SwappingRoot(directory, lambda: write_manifest(directory, then))
    require_equal(await stio.load(root, verify=True), tensors)
    root.close()
    root = SwappingRoot(directory, lambda: write_manifest(directory, other))
    write_manifest(directory, other)
    with pytest.raises(IntegrityError):
        await stio.load(root, verify=True)
    root.close()


@pytest.mark.parametrize("generation", ["gone", "there"])
async def test_a_manifest_that_comes_or_goes_while_files_are_opened(directory, tensors, generation):
    good = manifest_of(directory)
    if generation == "there":
        (directory / MANIFEST).unlink()
        swap = lambda: write_manifest(directory, good)  # noqa: E731
    else:
        swap = lambda: (directory / MANIFEST).unlink(missing_ok=True)  # noqa: E731
    root = SwappingRoot(directory, swap)
    require_equal(await stio.load(root, verify=True), tensors)
    root.close()


async def test_an_algorithm_that_changes_while_files_are_opened(directory, tensors):
    good = manifest_of(directory)
    write_manifest(directory, {"version": 1, "algorithm": "xxh3", "files": {}})
    root = SwappingRoot(directory, lambda: write_manifest(directory, good))
    require_equal(await stio.load(root, verify=True), tensors)
    root.close()


# What goes wrong while files are hashed.


@pytest.mark.matrix
async def test_c89_eio_at_every_read(root, by):
    for n in range(200):
        left = [n]

        def hook(name, offset, nbytes, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise StorageError("reading failed", errno=errno.EIO, path=name, offset=offset)

        root.hook = hook
        with nothing_left():
            try:
                await by(root, verify=True, memory="copy", budget_bytes=64 * KIB)
            except StorageError as error:
                assert error.errno == errno.EIO
            assert all(file.closed for file in root.files)
        if left[0] >= 0:
            break
    assert 6 < n < 199
    assert not any(file.inside for file in root.files)


async def test_c91_a_file_that_is_rewritten_meanwhile_is_not_called_damaged(root, directory):
    def hook(name, offset, nbytes):
        damage(directory / name)
        os.utime(directory / name, ns=(1, 1))

    root.hook = hook
    with pytest.raises(ChangedDuringReadError):
        await stio.load(root, verify=True)


async def test_c90_a_file_that_shrinks_meanwhile(root, directory):
    root.hook = lambda name, offset, nbytes: os.truncate(directory / name, 100)
    with pytest.raises(stio.StioError) as caught:
        await stio.load(root, verify=True)
    assert isinstance(caught.value, stio.TruncatedError | ChangedDuringReadError)


async def test_the_first_error_ends_the_others(root, directory, monkeypatch):
    """Hashing ends where it stands once a file is known to be wrong."""
    monkeypatch.setattr("stio.storage.checkpoint.integrity.num_processors", lambda: 2)
    monkeypatch.setattr("stio.storage.checkpoint.integrity.PIECE_BYTES", 4 * KIB)
    damage(directory / "model-00001-of-00003.safetensors")
    seen = threading.Event()
    made = []
    run = WorkerPool.run
    monkeypatch.setattr(WorkerPool, "run", lambda self, *a: (made.append(self), run(self, *a)))

    def hook(name, offset, nbytes):
        if name == SHARD:
            seen.set()
            assert eventually(lambda: made[0].stopped)
        elif offset:
            assert seen.wait(5)

    root.hook = hook
    with pytest.raises(IntegrityError) as caught:
        await stio.load(root, verify=True)
    assert caught.value.path == str(directory / "model-00001-of-00003.safetensors")
    assert len([offset for name, offset, _ in root.log if name == SHARD]) <= 3


async def test_memory_stays_within_the_budget(root, directory, monkeypatch):
    monkeypatch.setattr("stio.storage.checkpoint.integrity.num_processors", lambda: 64)
    budget = 64 * KIB
    lengths = []
    root.hook = lambda name, offset, nbytes: lengths.append(nbytes)
    async with stio.open(root, verify=True, budget_bytes=budget):
        assert sum(lengths) == sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        assert max(lengths) <= budget  # by one thread, since a second one would have to share it


async def test_without_threads_to_spare(directory, tensors, monkeypatch):
    def refuse(run, *, name):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("stio.runtime.workers.start_thread", refuse)
    require_equal(await stio.load(directory, verify=True), tensors)


async def test_files_are_hashed_side_by_side(root, tensors, monkeypatch):
    monkeypatch.setattr("stio.storage.checkpoint.integrity.num_processors", lambda: 3)
    together = threading.Barrier(3, timeout=5)
    waited = set()

    def hook(name, offset, nbytes):
        if name not in waited and offset == 0:
            waited.add(name)
            together.wait()

    root.hook = hook
    require_equal(await stio.load(root, verify=True), tensors)
    assert len(waited) == 3


# Cancels.


@pytest.fixture(params=["load", "open", "load_into"])
def make(request, directory):
    async def load():
        await stio.load(directory, verify=True, memory="copy", budget_bytes=64 * KIB)

    async def open_only():
        async with stio.open(directory, verify=True):
            pass

    async def load_into():
        await stio.load_into(zeros()[0], directory, verify=True)

    return {"load": load, "open": open_only, "load_into": load_into}[request.param]


@pytest.mark.matrix
async def test_cancel_at_every_await(make):
    assert await cancelled_at_every_await(make) > 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)
async def test_native_cancel_at_every_await(make):
    for at_resume in (False, True):
        assert await cancelled_natively_at_every_await(make, at_resume=at_resume) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("way", [by_load, by_open, by_load_into], ids=lambda way: way.__name__)
async def test_a_cancelled_verification_waits_for_reads_under_way(root, way, monkeypatch):
    monkeypatch.setattr("stio.storage.checkpoint.integrity.num_processors", lambda: 3)
    root.hook = gate = Gate(after=1)
    over = []

    async def verify():
        try:
            await way(root, verify=True)
        finally:
            over.append(sum(file.inside for file in root.files))

    with nothing_left():
        async with anyio.create_task_group() as group:
            group.start_soon(verify)
            assert await eventually_async(gate.reached.is_set)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await spin(30)
                assert over == []  # a thread uses a buffer: the cancel is not passed on yet
                gate.opened.set()
        assert over == [0]
        assert all(file.closed for file in root.files)


async def test_a_cancel_ends_the_hashing_soon(root, monkeypatch):
    monkeypatch.setattr("stio.storage.checkpoint.integrity.num_processors", lambda: 2)
    monkeypatch.setattr("stio.storage.checkpoint.integrity.PIECE_BYTES", 4 * KIB)
    root.hook = gate = Gate()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: by_load(root, verify=True))
        assert await eventually_async(gate.reached.is_set)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await spin(30)
            gate.opened.set()
    assert root.data_bytes_read <= 2 * 4 * KIB  # one piece a thread
