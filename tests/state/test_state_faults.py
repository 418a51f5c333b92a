"""Nested state where something is wrong: files that lie, values that cannot be saved, disks that fail, cancels."""

from __future__ import annotations

import errno
import hashlib

import pytest
import safetensors.torch
import torch
from support import (
    backend_name,
    cancelled_at_every_await,
    cancelled_natively_at_every_await,
    hook_writes,
    nothing_left,
    ramp,
    require_equal,
)

import stio
from stio.format.state.tree import POINTER, STATE_KEY, TREE_TENSOR, encode_tree
from stio.storage.commit import syscalls as calls

pytestmark = pytest.mark.anyio


# Files that are wrong.


def hostile(path, nodes, tensors=None, **metadata):
    text = encode_tree(nodes).decode() if isinstance(nodes, list) else nodes
    safetensors.torch.save_file(tensors or {}, path, metadata={STATE_KEY: text} | metadata)
    return path


async def test_a_plain_checkpoint_is_told_apart(tmp_path):
    await stio.save({"w": ramp(3)}, tmp_path / "s.safetensors")
    with pytest.raises(stio.FormatError, match=r"s\.safetensors: .*stio\.load`.*stio\.save_state"):
        await stio.load_state(tmp_path / "s.safetensors")
    with pytest.raises(stio.CheckpointNotFoundError):
        await stio.load_state(tmp_path / "none.safetensors")


BYTES = torch.uint8
A, B = torch.ones(2), torch.arange(3)

HOSTILE = {
    "no such tensor": ([("tensor", "b")], {"a": A}, "does not exist.*found b"),
    "no tensor at all": ([("tensor", "b")], {}, "does not exist"),
    "a tensor too many": ([("tensor", "a")], {"a": A, "b": B}, "has no place.*found b"),
    "tensors without a place": ([1], {"a": A}, "has no place"),
    "a tree tensor without a pointer": ([1], {TREE_TENSOR: torch.zeros(2, dtype=BYTES)}, "has no place"),
    "the tree as a leaf": ([("list", 1), ("tensor", TREE_TENSOR)], {"a": A}, "does not exist"),
    "bytes and a tensor": (
        [("list", 2), ("tensor", "a"), ("bytes_tensor", "a")],
        {"a": torch.zeros(1, dtype=BYTES)},
        "holds bytes of the state.*found a",
    ),
    "parameter of integers": ([("parameter", "a")], {"a": B}, "cannot be a parameter.*int64"),
    "bytes of floats": ([("bytes_tensor", "a")], {"a": A}, "should hold bytes.*F32"),
    "bytes of two dimensions": ([("bytes_tensor", "a")], {"a": torch.zeros(1, 1, dtype=BYTES)}, "should hold"),
    "dtype": ([("dtype", "float31")], {}, "no such dtype"),
    "dtype that is code": ([("dtype", "nn.Module")], {}, "no such dtype"),
    "device": ([("device", "toaster:0")], {}, "no such device"),
    "device number": ([("device", "cuda:" + "9" * 30)], {}, "no such device"),
    "device text": ([("device", "\x1b[31m")], {}, "no such device"),
    "no tree": ("", {}, "malformed"),
    "pickle": ("\x80\x04K\x01.", {}, "malformed"),
    "version": ('{"stio.state":2,"nodes":[\n1\n]}', {}, "another version"),
    "pointer to nothing": (POINTER, {"a": A}, "missing.*/stio.state"),
    "pointer to floats": (POINTER, {TREE_TENSOR: A}, "should hold bytes"),
    "pointer to nonsense": (POINTER, {TREE_TENSOR: torch.arange(9, dtype=BYTES)}, "malformed"),
    "pointer to no bytes": (POINTER, {TREE_TENSOR: torch.zeros(0, dtype=BYTES)}, "malformed"),
    "pointer to a pointer": (POINTER, {TREE_TENSOR: torch.tensor(list(POINTER.encode()), dtype=BYTES)}, "malformed"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_files(tmp_path, name):
    nodes, tensors, message = HOSTILE[name]
    path = hostile(tmp_path / "s.safetensors", nodes, tensors)
    with nothing_left():
        with pytest.raises(stio.FormatError, match=f"(?s)s.safetensors: .*{message}") as caught:
            await stio.load_state(path)
    assert str(caught.value).isprintable()


async def test_aliases_that_lead_astray(tmp_path):
    nodes = [("list", 2), ("tensor", "a"), ("tensor", "b")]
    path = tmp_path / "s.safetensors"
    for aliases in ('{"b":"b"}', '{"b":"c","c":"b"}', '{"a":"b","b":"a"}', "{", '{"b":1}', '["b"]'):
        with pytest.raises(stio.FormatError, match=r"stio\.aliases"):
            await stio.load_state(hostile(path, nodes, {"a": A}, **{"stio.aliases": aliases}))
    found = await stio.load_state(hostile(path, nodes, {"a": A}, **{"stio.aliases": '{"b":"a"}'}))
    assert found[0] is found[1]
    with pytest.raises(stio.FormatError, match="has no place.*found b"):
        await stio.load_state(hostile(path, [("tensor", "a")], {"a": A}, **{"stio.aliases": '{"b":"a"}'}))


async def test_a_long_tree_that_names_itself(tmp_path):
    tree = encode_tree([("list", 2), ("tensor", TREE_TENSOR), "x" * 100])
    tensors = {TREE_TENSOR: torch.tensor(list(tree), dtype=BYTES)}
    with pytest.raises(stio.FormatError, match="holds bytes of the state.*/stio.state"):
        await stio.load_state(hostile(tmp_path / "s.safetensors", POINTER, tensors))


async def test_the_tree_is_checked_before_any_tensor_is_read(tmp_path):
    path = hostile(tmp_path / "s.safetensors", [("list", 2), ("tensor", "a")], {"a": A})
    seen = []
    with pytest.raises(stio.FormatError):
        await stio.load_state(path, progress=seen.append)
    assert seen == []


async def test_limits_bound_the_tree(tmp_path):
    for state in ([1] * 50, [1] * 50_000):
        await stio.save_state(state, tmp_path / "s.safetensors")
        assert await stio.load_state(tmp_path / "s.safetensors") == state
        with pytest.raises(stio.LimitError, match="max_state_nodes"):
            await stio.load_state(tmp_path / "s.safetensors", limits=stio.Limits(max_state_nodes=len(state)))
        with pytest.raises(stio.LimitError, match="state_bytes"):
            await stio.load_state(tmp_path / "s.safetensors", limits=stio.Limits(state_bytes=100))


# All or nothing.


def digest(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("leaf", "error"),
    [
        (1j, TypeError),
        ({float("nan"): 1}, ValueError),
        (torch.ones(2).to_sparse(), ValueError),
        (torch.ones(2, device="meta"), ValueError),
        (torch.ones(2, dtype=torch.complex128), stio.UnsupportedDtypeError),
    ],
)
async def test_nothing_is_written_of_what_cannot_be_saved(tmp_path, leaf, error):
    await stio.save_state({"old": ramp(3)}, tmp_path / "s")
    before = digest(tmp_path / "s")
    state = {"a": [1] * 5000, "b": ramp(1000), "c": [leaf]}
    with nothing_left():
        with pytest.raises(error, match=r"c/0|\['c'\]\[0\]"):
            await stio.save_state(state, tmp_path / "s")
        with pytest.raises(error):
            await stio.save_state(state, tmp_path / "fresh" / "s.safetensors")
        async with stio.Saver() as saver:
            with pytest.raises(error):
                await saver.save_state(state, tmp_path / "s")
    assert digest(tmp_path / "s") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


async def test_a_failed_write_leaves_the_old_one(tmp_path, monkeypatch):
    await stio.save_state({"old": ramp(3)}, tmp_path / "s")
    before = digest(tmp_path / "s")

    def fail():
        raise OSError(errno.EIO, "as asked")

    hook_writes(fail, monkeypatch.setattr)
    with pytest.raises(stio.StorageError):
        await stio.save_state({"new": ramp(5)}, tmp_path / "s")
    assert digest(tmp_path / "s") == before
    require_equal(await stio.load_state(tmp_path / "s"), {"old": ramp(3)})


async def test_all_is_synced_before_it_is_published(tmp_path, monkeypatch):
    seen = []
    for name in ("fsync", "rename", "sync_directory"):
        whole = getattr(calls, name)
        monkeypatch.setattr(calls, name, lambda *a, _w=whole, _n=name, **k: (seen.append(_n), _w(*a, **k))[1])
    await stio.save_state({"a": ramp(3)}, tmp_path / "s.safetensors")
    published = seen.index("rename", seen.index("rename") + 1)  # the first one shows that the filesystem renames
    assert "fsync" in seen[:published]
    assert "sync_directory" in seen[published:]


@pytest.mark.matrix
@pytest.mark.parametrize("size", [5, 20_000])
@pytest.mark.parametrize("how", ["scope", "native"])
@pytest.mark.parametrize("what", ["save", "load", "saver"])
async def test_a_cancel_at_every_await(tmp_path, anyio_backend, what, how, size):
    path = tmp_path / "s.safetensors"
    state = {"a": ramp(300), "log": list(range(size))}
    await stio.save_state(state, path)

    async def run():
        if what == "load":
            await stio.load_state(path)
        elif what == "save":
            await stio.save_state(state, path)
        else:
            async with stio.Saver() as saver:
                await (await saver.save_state(state, path))

    if how == "native":
        if backend_name(anyio_backend) != "asyncio":
            pytest.skip("asyncio's own")
        assert await cancelled_natively_at_every_await(run, at_resume=False) >= 1
    else:
        assert await cancelled_at_every_await(run) >= 1
    found = await stio.load_state(path)
    assert found.pop("log") == state.pop("log")
    require_equal(found, state)
    assert [one.name for one in tmp_path.iterdir()] == ["s.safetensors"]
