"""Saves that write what changed: `Saver(full_every=)` and `save(base=)`, their images, their bases, what is deleted."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import threading
import warnings

import pytest
import torch
from accelerators import gpu
from bit_paths import DTYPES, patterns
from counts import count
from deltas import write_chain
from support import before_writes, bits_of, cancelled_after_every_round, hook_writes

import stio
import stio.distributed
import stio.sync
from stio.device.base import resolve_device
from stio.device.tensors import TORCH_DTYPES
from stio.errors import CheckpointNotFoundError, ClosedError, MismatchError, StorageError
from stio.format.delta import DELTA_KEY, DELTA_POINTER, DELTA_TENSOR, FORMAT, ID_KEY, MAX_LINKS
from stio.format.files import Manifest
from stio.saving import deltas
from stio.storage.checkpoint import OpenOptions, open_checkpoint, read_tensor

MIB = 1 << 20


def state(*, seed=0, num_tensors=5, rows=64, columns=50, dtype=torch.bfloat16):
    chance = torch.Generator().manual_seed(seed)
    return {f"layer.{k}": torch.randn(rows, columns + k, generator=chance).to(dtype) for k in range(num_tensors)}


def changed(tensors, *, fraction=0.02, seed=1):
    """Change bits of some elements, in place."""
    chance = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        rows = tensor.detach().view(torch.uint8) if tensor.itemsize == 1 else tensor.detach()
        flat = rows.view(-1)
        chosen = torch.rand(flat.numel(), generator=chance) < fraction
        flat[chosen] = (torch.randint(1, 100, (int(chosen.sum()),), generator=chance)).to(flat.dtype)
    return tensors


def copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def require_saved(path, expected):
    """Compare each bit of a checkpoint, and its names, aliases included."""
    opened = open_checkpoint(path)
    try:
        assert opened.dtypes_and_shapes().keys() | opened.aliases.keys() == expected.keys()
        for name, tensor in expected.items():
            assert read_tensor(opened, opened.info(name)).tobytes() == bits_of(tensor.detach().cpu()), (path, name)
    finally:
        opened.close()


def metadata_of(file):
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def loads(path):
    """Whether a checkpoint and all that it is based on are there, and are what it was made from."""
    try:
        open_checkpoint(path).close()
    except CheckpointNotFoundError:
        return False
    return True


# What is written.


def test_of_so_many_saves_one_is_full(tmp_path):
    tensors, results = state(), []
    with stio.sync.Saver(full_every=3) as saver:
        for step in range(7):
            changed(tensors, seed=step)
            result = saver.save(tensors, tmp_path / f"step-{step}").result()
            require_saved(tmp_path / f"step-{step}", tensors)
            results.append(result)
    assert [result.kind for result in results] == ["full", "delta", "delta"] * 2 + ["full"]
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert {result.total_bytes for result in results} == {total}
    for step, result in enumerate(results):
        folder = tmp_path / f"step-{step}"
        assert result.written_bytes == sum(file.stat().st_size for file in folder.iterdir())
        assert result.file_bytes == (folder / result.files[0]).stat().st_size
        assert result.files == (("delta.safetensors",) if step % 3 else ("model.safetensors",))
        assert result.changed_bytes == total if step % 3 == 0 else 0 < result.changed_bytes < total * 0.03
    assert "delta" in repr(results[1]) and "delta" not in repr(results[0])


@pytest.mark.parametrize("full_every", [1, None])
def test_all_saves_are_full(tmp_path, full_every):
    tensors = state()
    with stio.sync.Saver(full_every=full_every) as saver:
        results = [saver.save(tensors, tmp_path / f"step-{step}").result() for step in range(3)]
        if full_every:
            assert saver._twin._shared.chain.image is None
    assert {result.kind for result in results} == {"full"}
    assert {result.changed_bytes for result in results} == {results[0].total_bytes}
    ids = [metadata_of(tmp_path / f"step-{step}" / "model.safetensors").get(ID_KEY) for step in range(3)]
    assert len(set(ids)) == (3 if full_every else 1)
    assert all(map(bool, ids)) == bool(full_every)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_changes(tmp_path, dtype):
    one = patterns(dtype)
    tensors = {"a": torch.cat([one, one.flip(0), one]), "b": one.clone()}
    kept = {name: tensor.view(TORCH_DTYPES[dtype]) for name, tensor in tensors.items()}
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(kept, tmp_path / "step-0").result()
        for step, stride in ((1, 7), (2, 31)):
            for tensor in tensors.values():
                tensor[step::stride] = tensor.flip(0)[step::stride]
            result = saver.save(kept, tmp_path / f"step-{step}").result()
            require_saved(tmp_path / f"step-{step}", kept)
    assert result.kind == "delta" and result.changed_bytes > 0


def test_tied_empty_and_single_values(tmp_path):
    base = torch.randn(40, 30)
    tensors = {
        "a": base,
        "tied": base,
        "part": base[3:7],
        "transposed": torch.randn(30, 200).t(),
        "empty": torch.zeros(0, 3),
        "one": torch.tensor(1.0),
        "flag": torch.tensor(True),
    }
    with stio.sync.Saver(full_every=5) as saver:
        for step in range(3):
            base[step] += 1
            tensors["one"] += 1
            tensors["transposed"][:, step] = step
            result = saver.save(tensors, tmp_path / f"step-{step}").result()
            require_saved(tmp_path / f"step-{step}", tensors)
            assert dict(result.aliases) == {"tied": "a"}
    assert result.kind == "delta"
    opened = open_checkpoint(tmp_path / "step-2", OpenOptions(joins=False))
    opened.close()
    assert "flag" not in opened.headers[0] and "one" in opened.headers[0]
    assert "stio.aliases" not in opened.metadata


def test_nothing_has_changed(tmp_path):
    tensors = state()
    with stio.sync.Saver(full_every=5) as saver:
        for step in range(2):
            result = saver.save(tensors, tmp_path / f"step-{step}").result()
    assert (result.kind, result.changed_bytes) == ("delta", 0)
    require_saved(tmp_path / "step-1", tensors)


def test_more_than_half_is_a_full_save(tmp_path):
    """Of the image: the tensors may change as soon as the call returns."""
    tensors = state(num_tensors=4)
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        for name in ("layer.0", "layer.1", "layer.2"):
            tensors[name].neg_()
        expected = copies(tensors)
        pending_save = saver.save(tensors, tmp_path / "step-1")
        changed(tensors, fraction=1.0)
        assert (full := pending_save.result()).kind == "full"
        assert full.changed_bytes == full.total_bytes
        assert DELTA_KEY not in metadata_of(tmp_path / "step-1" / "model.safetensors")
        require_saved(tmp_path / "step-1", expected)
        expected["layer.0"][1] = 0
        assert saver.save(expected, tmp_path / "step-2").result().kind == "delta"
        require_saved(tmp_path / "step-2", expected)


def test_a_tensor_that_changed_much_is_whole(tmp_path):
    tensors = state(num_tensors=6)
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        tensors["layer.0"].neg_()
        tensors["layer.1"][0, 0] = 9
        expected = copies(tensors)
        pending_save = saver.save(tensors, tmp_path / "step-1")
        changed(tensors, fraction=1.0)
        assert pending_save.result().kind == "delta"
    require_saved(tmp_path / "step-1", expected)
    opened = open_checkpoint(tmp_path / "step-1", OpenOptions(joins=False))
    opened.close()
    assert set(opened.headers[0].names) == {"layer.0", f"{DELTA_TENSOR}/0/positions", f"{DELTA_TENSOR}/0/values"}


@pytest.mark.parametrize("fraction", [0.02, 1.0])
def test_the_tensors_may_change_after_the_call(tmp_path, fraction):
    tensors = state()
    reached, opened = threading.Event(), threading.Event()
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        changed(tensors, fraction=fraction)
        expected = copies(tensors)

        def hold():
            reached.set()
            assert opened.wait(20)

        with before_writes(hold):
            pending_save = saver.save(tensors, tmp_path / "step-1")
            assert pending_save.staged and not pending_save.done()
            for tensor in tensors.values():
                tensor.zero_()
            opened.set()
            pending_save.result()
    require_saved(tmp_path / "step-1", expected)


def test_shards(tmp_path):
    tensors = state(num_tensors=8, rows=200)
    with stio.sync.Saver(full_every=5, max_shard_size=50_000) as saver:
        for step in range(3):
            changed(tensors, seed=step, fraction=0.4 if step == 2 else 0.02)
            tensors["layer.5"][0, 0] += 1
            result = saver.save(tensors, tmp_path / f"step-{step}", max_shard_size=2000 if step else 50_000).result()
            require_saved(tmp_path / f"step-{step}", tensors)
            if step == 1:
                assert result.kind == "delta" and len(result.files) > 2
                found = [metadata_of(tmp_path / "step-1" / name) for name in result.files]
                index = json.loads((tmp_path / "step-1" / "delta.safetensors.index.json").read_bytes())["metadata"]
                assert {one["format"] for one in found} == {FORMAT}
                assert {one[ID_KEY] for one in found} == {index[ID_KEY]}
                assert not any(DELTA_KEY in one for one in found) and index[DELTA_KEY].startswith('{"stio.delta":1')
                assert result.written_bytes == sum(file.stat().st_size for file in (tmp_path / "step-1").iterdir())


@pytest.mark.parametrize("folder", ["", "deep/er"])
def test_single_files(tmp_path, folder):
    tensors = state()
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    with stio.sync.Saver(full_every=5) as saver:
        for step in range(3):
            changed(tensors, seed=step)
            path = tmp_path / folder / f"step-{step}.safetensors"
            result = saver.save(tensors, path).result()
            require_saved(path, tensors)
    assert result.kind == "delta"


def test_names_of_its_own(tmp_path):
    """Another checkpoint is in each directory: the base is named by its file."""
    tensors, others = state(), state(seed=5)
    keywords = {"filename_pattern": "ema{suffix}.safetensors"}
    with stio.sync.Saver(full_every=5, keep_last=1, **keywords) as saver, stio.sync.Saver() as plain:
        for step in range(3):
            changed(tensors, seed=step)
            assert saver.save(tensors, tmp_path / f"step-{step}").result().kind == ("delta" if step else "full")
            plain.save(others, tmp_path / f"step-{step}").result()
    require_saved(tmp_path / "step-2" / "delta-ema.safetensors", tensors)
    require_saved(tmp_path / "step-2" / "model.safetensors", others)


def test_a_long_description_is_a_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(deltas, "_INLINE_BYTES", 100)
    tensors = state()
    with stio.sync.Saver(full_every=5, max_shard_size=2000) as saver:
        for step in range(3):
            changed(tensors, seed=step)
            saver.save(tensors, tmp_path / f"step-{step}", max_shard_size="1MB" if step == 1 else 2000).result()
            require_saved(tmp_path / f"step-{step}", tensors)
    assert metadata_of(tmp_path / "step-1" / "delta.safetensors")[DELTA_KEY] == DELTA_POINTER


def test_nested_state(tmp_path):
    """The metadata are those of the newest save."""
    nested = {"model": state(), "step": 0, "betas": (0.9, 0.95)}
    with stio.sync.Saver(full_every=5) as saver:
        for step in range(3):
            nested["step"] = step
            changed(nested["model"], seed=step)
            result = saver.save_state(nested, tmp_path / f"step-{step}").result()
            require_saved(tmp_path / f"step-{step}", {f"model/{name}": one for name, one in nested["model"].items()})
            opened = open_checkpoint(tmp_path / f"step-{step}")
            opened.close()
            assert f'"step",{step}' in opened.metadata["stio.state"].replace(" ", "")
    assert result.kind == "delta"


def test_lazy_tensors(tmp_path):
    tensors = state(rows=20_000, num_tensors=3)
    order = []

    def parts(name):
        order.append(name)
        yield from tensors[name].split(7_000)

    def lazy(name):
        return stio.LazyTensor(torch.bfloat16, tuple(tensors[name].shape), lambda: parts(name))

    mixed = {"plain": torch.arange(10), **{name: lazy(name) for name in tensors}}
    with stio.sync.Saver(full_every=5) as saver:
        for step in range(3):
            changed(tensors, seed=step)
            result = saver.save(mixed, tmp_path / f"step-{step}").result()
            require_saved(tmp_path / f"step-{step}", {**tensors, "plain": torch.arange(10)})
    assert result.kind == "delta"
    assert order == [*tensors] * 3


def test_a_lazy_tensor_that_fails(tmp_path):
    tensors = state(num_tensors=1)

    def fail():
        raise RuntimeError("as asked")

    with stio.sync.Saver(full_every=5) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        wrong = {"layer.0": stio.LazyTensor(torch.bfloat16, tuple(tensors["layer.0"].shape), fail)}
        with pytest.raises(RuntimeError, match="as asked"):
            saver.save(wrong, tmp_path / "step-1")
        assert saver.save(tensors, tmp_path / "step-2").result().kind == "full"


@gpu
def test_tensors_on_a_device(tmp_path):
    device = resolve_device("auto")
    tensors = state(rows=3000, num_tensors=4)
    with stio.sync.Saver(full_every=9) as saver:
        for step in range(4):
            changed(tensors, seed=step, fraction=1.0 if step == 3 else 0.02)
            there = {name: tensor.to(device) for name, tensor in tensors.items()}
            there["turned"] = torch.arange(6.0).view(2, 3).to(device).t()
            pending_save = saver.save(there, tmp_path / f"step-{step}")
            for tensor in there.values():
                tensor.zero_()
            assert pending_save.result().kind == ("full" if step in (0, 3) else "delta")
            expected = {**tensors, "turned": torch.arange(6.0).view(2, 3).t()}
            require_saved(tmp_path / f"step-{step}", expected)


def test_tensors_longer_than_a_piece(tmp_path):
    tensors = {"long": torch.zeros(3 * MIB, dtype=torch.float64), "turned": torch.zeros(700, 900).t()}
    with stio.sync.Saver(full_every=5, budget_bytes="64MB") as saver:
        for step in range(3):
            tensors["long"][step :: 100_000 + step] = float(step + 1)
            tensors["turned"][step] = step
            result = saver.save(tensors, tmp_path / f"step-{step}").result()
            require_saved(tmp_path / f"step-{step}", tensors)
    assert result.kind == "delta"


def test_a_manifest_of_its_own(tmp_path):
    tensors = state()
    with stio.sync.Saver(full_every=5) as saver:
        for step in range(2):
            changed(tensors)
            result = saver.save(tensors, tmp_path / f"step-{step}", hash="xxh3" if step > 1 else None).result()
    assert not (tmp_path / "step-0" / "model.safetensors.manifest.json").exists()
    path = tmp_path / "step-1" / "delta.safetensors.manifest.json"
    manifest = Manifest.parse(path.read_bytes(), path=str(path))
    assert manifest.algorithm == "sha256"
    assert {name: states[0].digest for name, states in manifest.files.items()} == dict(result.hashes)


# When a save is full.


@pytest.mark.parametrize("what", ["added", "removed", "shape", "dtype", "tie"])
def test_other_tensors_are_a_full_save(tmp_path, what):
    tensors = state()
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        if what == "added":
            tensors["new"] = torch.zeros(3)
        elif what == "removed":
            del tensors["layer.0"]
        elif what == "shape":
            tensors["layer.0"] = tensors["layer.0"].t().contiguous()
        elif what == "dtype":
            tensors["layer.0"] = tensors["layer.0"].half()
        else:
            tensors["layer.9"] = tensors["layer.0"]
        assert saver.save(tensors, tmp_path / "step-1").result().kind == "full"
        require_saved(tmp_path / "step-1", tensors)
        assert saver.save(tensors, tmp_path / "step-2").result().kind == "delta"
        require_saved(tmp_path / "step-2", tensors)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("run/step-0", "run/step-1", "delta"),
        ("run/step-0", "step-1", "delta"),
        ("run/a/step-0", "run/step-1", "delta"),
        ("run/step-0", "run/best", "full"),
        ("run/best", "run/step-1", "full"),
        ("run/step-0", "other/step-1", "full"),
        ("step-0", "run/step-1", "full"),
        ("run/step-0", "run/step-0", "full"),
        ("run/step-3", "run/step-1", "full"),
        ("run/step-1", "run/step-2.safetensors", "full"),
        ("run/step-1.safetensors", "run/step-2", "full"),
        ("run/step-1/inner", "run/step-1", "full"),
        ("run/step\\1", "run/step-2", "full"),
    ],
)
def test_where_a_delta_may_be(tmp_path, first, second, kind):
    tensors = state()
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(tensors, tmp_path / first).result()
        changed(tensors)
        assert saver.save(tensors, tmp_path / second).result().kind == kind
    require_saved(tmp_path / second, tensors)


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_what_is_saved_to_again_is_no_base(tmp_path, suffix):
    """`best` beside the steps, and two names in turn: whatever was saved last under a name is there."""
    tensors, saved, kinds = state(), {}, []
    with stio.sync.Saver(full_every=9, keep_last=3) as saver:
        for step in range(6):
            for name in (f"step-{step}", "best", "even" if step % 2 else "odd"):
                path = tmp_path / f"{name}{suffix}"
                kinds.append(saver.save(changed(tensors, seed=step), path).result().kind)
                saved[path] = copies(tensors)
    for path, expected in saved.items():
        if path.exists():
            require_saved(path, expected)
    assert kinds == ["full", "full", "full", *["delta", "full", "full"] * 5]


def test_a_step_that_deltas_are_based_on_may_be_replaced(tmp_path, caplog):
    tensors = state()
    with stio.sync.Saver(full_every=9) as saver:
        for name in ("step-1", "step-2", "step-1"):
            result = saver.save(changed(tensors, seed=len(name)), tmp_path / name).result()
    assert result.kind == "full" and "can no longer be loaded" in caplog.text
    require_saved(tmp_path / "step-1", tensors)


def test_a_full_save_replaces_the_delta_in_its_directory(tmp_path):
    tensors, again = state(), state(seed=7)
    with stio.sync.Saver(full_every=9, max_shard_size=2000) as saver:
        for step in range(2):
            saver.save(changed(tensors, seed=step), tmp_path / f"step-{step}").result()
    stio.sync.save(again, tmp_path / "step-1")
    left = [path.name for path in (tmp_path / "step-1").iterdir() if "delta" in path.name]
    assert left == ["delta.safetensors.manifest.json"]
    (tmp_path / "step-1" / "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError):
        stio.sync.load(tmp_path / "step-1")


def test_other_files_beside_a_delta(tmp_path):
    tensors, others = state(), state(seed=3)
    with stio.sync.Saver(full_every=9) as saver:
        for step in range(3):
            saver.save(changed(tensors, seed=step), tmp_path / f"step-{step}").result()
            stio.sync.save(others, tmp_path / f"step-{step}" / "optimizer.safetensors")
            require_saved(tmp_path / f"step-{step}", tensors)
    assert stio.latest(tmp_path) == str(tmp_path / "step-2")


def test_a_save_by_hand_over_what_its_base_is_based_on_is_refused(tmp_path):
    tensors = state()
    stio.sync.save(tensors, tmp_path / "a.safetensors")
    before = copies(changed(tensors))
    stio.sync.save(tensors, tmp_path / "b.safetensors", base=tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="is based on what is at the destination"):
        stio.sync.save(changed(tensors, seed=2), tmp_path / "a.safetensors", base=tmp_path / "b.safetensors")
    require_saved(tmp_path / "b.safetensors", before)


def test_a_base_that_changes_while_it_is_compared_is_an_error(tmp_path, monkeypatch):
    tensors = state()
    stio.sync.save(tensors, tmp_path / "a")

    def read_and_write(opened, info):
        region = read_tensor(opened, info)
        with open(tmp_path / "a" / "model.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
            file.truncate()
        os.utime(tmp_path / "a" / "model.safetensors")
        return region

    monkeypatch.setattr(deltas, "read_tensor", read_and_write)
    with pytest.raises(stio.ChangedDuringReadError):
        stio.sync.save(changed(tensors), tmp_path / "b", base=tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_changes_have_a_place_in_the_budget(tmp_path):
    """More than fits is a full save, which is written from the image."""
    tensors = state(num_tensors=2, rows=2000, columns=4000)
    total = sum(tensor.nbytes for tensor in tensors.values())
    with stio.sync.Saver(full_every=9, budget_bytes=total + 6 * MIB) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        kinds = [
            saver.save(changed(tensors, seed=step, fraction=fraction), tmp_path / f"step-{step}").result().kind
            for step, fraction in ((1, 0.01), (2, 0.3))
        ]
    assert kinds == ["delta", "full"]
    require_saved(tmp_path / "step-2", tensors)


@pytest.mark.parametrize("max_shard_size", [None, 2000])
def test_a_directory_with_a_full_checkpoint_gets_no_delta(tmp_path, max_shard_size):
    """Of both it is the one that every reader takes: also where the delta is older and has an index."""
    tensors = state()
    with stio.sync.Saver(full_every=9, max_shard_size=max_shard_size) as saver:
        for step in range(2):
            result = saver.save(changed(tensors, seed=step), tmp_path / f"step-{step}").result()
    assert result.kind == "delta"
    stio.sync.save(changed(tensors, seed=2), tmp_path / "step-1")
    require_saved(tmp_path / "step-1", tensors)
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        assert saver.save(changed(tensors, seed=3), tmp_path / "step-1").result().kind == "full"
    require_saved(tmp_path / "step-1", tensors)
    assert stio.sync.save(changed(tensors, seed=4), tmp_path / "step-1", base=tmp_path / "step-0").kind == "full"
    require_saved(tmp_path / "step-1", tensors)


@pytest.mark.parametrize("harm", ["deleted", "replaced", "first one deleted"])
def test_a_base_that_is_not_there_any_more(tmp_path, harm):
    tensors = state()
    with stio.sync.Saver(full_every=9) as saver:
        for step in range(2):
            saver.save(changed(tensors, seed=step), tmp_path / f"step-{step}").result()
        is_first = harm == "first one deleted"
        file = tmp_path / ("step-0/model.safetensors" if is_first else "step-1/delta.safetensors")
        data = file.read_bytes()
        file.unlink()
        if harm == "replaced":
            file.write_bytes(data)
        assert saver.save(changed(tensors, seed=3), tmp_path / "step-2").result().kind == "full"
    require_saved(tmp_path / "step-2", tensors)


def test_a_destination_of_the_callers_own_is_no_base(tmp_path):
    from fakes import MemoryDestination

    tensors = state()
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        assert saver.save(tensors, MemoryDestination()).result().kind == "full"
        assert saver.save(tensors, tmp_path / "step-1").result().kind == "full"
        assert saver.save(tensors, tmp_path / "step-2").result().kind == "delta"


@pytest.mark.parametrize("when", ["full", "delta"])
def test_after_a_write_that_failed_the_next_save_is_full(tmp_path, monkeypatch, when):
    tensors = state()
    with stio.sync.Saver(full_every=9) as saver:
        for step in range(1 if when == "full" else 3):
            saver.save(changed(tensors, seed=step), tmp_path / f"step-{step}").result()
        if when == "full":
            tensors["more"] = torch.zeros(2)

        def fail():
            raise OSError(errno.EIO, "as asked")

        with monkeypatch.context() as patch:
            hook_writes(fail, patch.setattr)
            with pytest.raises(StorageError):
                saver.save(changed(tensors, seed=7), tmp_path / "step-7").result()
        assert not (tmp_path / "step-7").exists()
        assert saver.save(changed(tensors, seed=8), tmp_path / "step-8").result().kind == "full"
        require_saved(tmp_path / "step-8", tensors)
        assert saver.save(changed(tensors, seed=9), tmp_path / "step-9").result().kind == "delta"
        require_saved(tmp_path / "step-9", tensors)


def test_cancelled_before_it_is_durable(tmp_path):
    tensors = state()
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        opened = threading.Event()
        with before_writes(lambda: opened.wait(20)):
            pending_save = saver.save(changed(tensors), tmp_path / "step-1")
            pending_save.cancel()
            opened.set()
            with pytest.raises(ClosedError):
                pending_save.result()
        assert not (tmp_path / "step-1").exists()
        assert saver.save(tensors, tmp_path / "step-2").result().kind == "full"
    require_saved(tmp_path / "step-2", tensors)


@pytest.mark.anyio
async def test_cancelled_at_any_time(tmp_path):
    """What is there afterwards loads: a delta never without its base."""
    tensors = state(num_tensors=3)
    numbers = iter(range(10_000))

    async def body():
        async with stio.Saver(full_every=4, durability="none") as saver:
            for _ in range(3):
                changed(tensors, seed=(step := next(numbers)))
                await saver.save(tensors, tmp_path / f"step-{step}")

    await cancelled_after_every_round(body)
    assert next(numbers) > 9
    assert all(loads(path) for path in tmp_path.iterdir())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.anyio
async def test_two_saves_at_one_time(tmp_path):
    """A save waits for the end of the one before it, which writes from the image until then."""
    tensors, expected, saves = state(), [], []
    async with stio.Saver(full_every=3, max_pending=2) as saver:
        for step in range(8):
            changed(tensors, seed=step, fraction=1.0 if step == 4 else 0.02)
            expected.append(copies(tensors))
            saves.append(await saver.save(tensors, tmp_path / f"step-{step}"))
            for tensor in tensors.values():
                tensor.zero_()
            for name, tensor in expected[-1].items():
                tensors[name].copy_(tensor)
    results = [await save for save in saves]
    assert [result.kind for result in results] == ["full", "delta", "delta", "full", "full", "delta", "delta", "full"]
    for step, one in enumerate(expected):
        require_saved(tmp_path / f"step-{step}", one)


def test_the_save_before_fails_while_the_next_one_waits(tmp_path, monkeypatch):
    tensors = state()
    reached, opened = threading.Event(), threading.Event()
    failures = [OSError(errno.EIO, "as asked")]  # one: the next save may begin before the hook is gone

    def fail():
        if failures:
            error = failures.pop()
            reached.set()
            assert opened.wait(20)
            raise error

    with stio.sync.Saver(full_every=9, max_pending=2) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        results = []
        with monkeypatch.context() as patch:
            hook_writes(fail, patch.setattr)
            first = saver.save(changed(tensors), tmp_path / "step-1")
            thread = threading.Thread(target=lambda: results.append(saver.save(tensors, tmp_path / "step-2")))
            thread.start()
            assert reached.wait(20)
            opened.set()
            with pytest.raises(StorageError):
                first.result()
        thread.join(20)
        assert results[0].result().kind == "full"
    require_saved(tmp_path / "step-2", tensors)


def test_a_budget_without_room_for_the_image(tmp_path, caplog):
    tensors = {"a": torch.zeros(2 * MIB), "b": torch.zeros(MIB)}
    with caplog.at_level(logging.WARNING, "stio"), stio.sync.Saver(full_every=9, budget_bytes="4MB") as saver:
        for step in range(3):
            assert saver.save(tensors, tmp_path / f"step-{step}").result().kind == "full"
        assert saver._twin._shared.pool.peak_bytes <= 4 * MIB
    assert [record.message for record in caplog.records if "every save is full" in record.message] == [
        caplog.records[0].message
    ]


def test_memory_stays_within_the_budget(tmp_path):
    tensors = {f"t{k}": torch.zeros(MIB // 4) for k in range(12)}
    with stio.sync.Saver(full_every=9, budget_bytes="20MB") as saver:
        shared = saver._twin._shared
        for step in range(4):
            for k in range(12 if step == 3 else 2):
                tensors[f"t{k}"].add_(1)  # at last more than half: all of it is written from the image
            result = saver.save(tensors, tmp_path / f"step-{step}").result()
            require_saved(tmp_path / f"step-{step}", tensors)
            assert shared.pool.peak_bytes + shared.chain.held_bytes <= 20 * 1000**2
            assert stio.stats().staging_held_bytes >= shared.chain.held_bytes > 12 * MIB
        assert result.kind == "full"
    assert shared.chain.held_bytes == 0


def test_the_host_has_too_little_memory(tmp_path, monkeypatch):
    tensors = {"a": torch.zeros(8 * MIB)}
    with stio.sync.Saver(full_every=9) as saver:
        saver.save(tensors, tmp_path / "step-0").result()
        monkeypatch.setattr("stio.saving.staging_pool.available_bytes", lambda: 4 * MIB)
        tensors["a"][5] = 1
        assert saver.save(tensors, tmp_path / "step-1").result().kind == "delta"  # the image is there already
    require_saved(tmp_path / "step-1", tensors)
    with stio.sync.Saver(full_every=9) as saver:
        for step in (2, 3):
            assert saver.save(tensors, tmp_path / f"step-{step}").result().kind == "full"


def test_a_forked_child_starts_afresh(tmp_path):
    tensors = state()
    with stio.sync.Saver(full_every=9, keep_last=1) as saver:
        for step in range(2):
            saver.save(changed(tensors, seed=step), tmp_path / f"step-{step}").result()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
            child = os.fork()
        if not child:
            code = 1
            try:
                kinds = [saver.save(tensors, tmp_path / f"child-{step}").result(20).kind for step in (5, 6)]
                code = 0 if kinds == ["full", "delta"] else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert saver.save(changed(tensors, seed=2), tmp_path / "step-2").result().kind == "delta"
    require_saved(tmp_path / "step-2", tensors)


@pytest.mark.parametrize("value", [0, -1])
def test_a_wrong_number(value):
    with pytest.raises(ValueError, match="full_every must be at least 1"):
        stio.Saver(full_every=value)


@pytest.mark.parametrize("value", [True, 2.5, "3"])
def test_no_number(value):
    with pytest.raises(TypeError, match="full_every takes a number"):
        stio.Saver(full_every=value)


def test_many_ranks_have_no_deltas():
    with pytest.raises(TypeError, match="full_every"):
        stio.distributed.Saver(full_every=3)
    with pytest.raises(TypeError, match="base"):
        stio.sync.distributed.save({}, "x", base="y")


# By hand.


@pytest.mark.parametrize("base_id", ["with an id", "without"])
@pytest.mark.parametrize("kind", ["directory", "file", "shards"])
def test_by_hand(tmp_path, base_id, kind):
    tensors = state()
    suffix = ".safetensors" if kind == "file" else ""
    keywords = {"max_shard_size": 20_000} if kind == "shards" else {}
    before, after = (tmp_path / f"step-{step}{suffix}" for step in range(2))
    if base_id == "without":
        stio.sync.save(tensors, before, **keywords)
    else:
        with stio.sync.Saver(full_every=2, **keywords) as saver:
            saver.save(tensors, before)
    changed(tensors)
    result = stio.sync.save(tensors, after, base=before)
    assert result.kind == "delta"
    require_saved(after, tensors)
    metadata = metadata_of(after / "delta.safetensors" if after.is_dir() else after)
    assert json.loads(metadata[DELTA_KEY])["base_id"].startswith("sha256:") == (base_id == "without")
    last = tmp_path / f"step-2{suffix}"
    changed(tensors, seed=9)
    assert stio.sync.save(tensors, last, base=str(after)).kind == "delta"
    require_saved(last, tensors)


def test_by_hand_more_than_half_is_full(tmp_path):
    tensors = state()
    stio.sync.save(tensors, tmp_path / "a")
    for tensor in tensors.values():
        tensor.neg_()
    result = stio.sync.save(tensors, tmp_path / "b", base=tmp_path / "a")
    assert (result.kind, result.changed_bytes) == ("full", result.total_bytes)
    require_saved(tmp_path / "b", tensors)
    tensors["layer.0"][0] = 1
    assert stio.sync.save(tensors, tmp_path / "c", base=tmp_path / "b").kind == "delta"
    require_saved(tmp_path / "c", tensors)


def test_by_hand_ties_and_lazy_tensors(tmp_path):
    plain = state()
    tensors = {**plain, "tied": plain["layer.0"]}
    stio.sync.save(tensors, tmp_path / "a")
    plain["layer.0"][3] = 7
    plain["layer.1"].neg_()
    given = {**tensors, "layer.1": stio.LazyTensor(torch.bfloat16, (64, 51), lambda: plain["layer.1"])}
    assert stio.sync.save(given, tmp_path / "b", base=tmp_path / "a").kind == "delta"
    require_saved(tmp_path / "b", tensors)


def test_by_hand_on_a_chain_of_others(tmp_path):
    tensors = state(dtype=torch.float32)
    write_chain(tmp_path, [tensors, changed(copies(tensors))])
    tensors = changed(changed(tensors), seed=4)
    result = stio.sync.save(tensors, tmp_path / "best", base=tmp_path / "step-1")
    assert result.kind == "delta"
    require_saved(tmp_path / "best", tensors)
    opened = open_checkpoint(tmp_path / "best")
    opened.close()
    assert len(opened.links) == 3


def test_by_hand_refusals(tmp_path):
    tensors = state()
    (tmp_path / "run").mkdir()
    stio.sync.save(tensors, tmp_path / "run" / "a")
    before = sorted(tmp_path.rglob("*"))

    def refused(error, match, *, to="run/b", base="run/a", given=tensors):
        with pytest.raises(error, match=match):
            stio.sync.save(given, tmp_path / to, base=tmp_path / base)
        assert sorted(tmp_path.rglob("*")) == before

    refused(ValueError, "is not beside the destination", to="other/b")
    refused(ValueError, "is not beside the destination", to="run/a")
    refused(CheckpointNotFoundError, "missing", base="run/missing")
    less = dict(list(tensors.items())[:-1])
    refused(
        MismatchError, "other tensors .* save without base=. The first tensor that differs is 'layer.4'", given=less
    )
    wider = {**tensors, "layer.0": tensors["layer.0"].float()}
    refused(MismatchError, "'layer.0'", given=wider)
    refused(MismatchError, "name that shares a tensor that differs is 'x'", given={**tensors, "x": tensors["layer.0"]})
    with pytest.raises(ValueError, match="base= and the destination are paths"):
        stio.sync.save(tensors, tmp_path / "run" / "b", base=3)  # type: ignore[arg-type]


def test_by_hand_a_chain_that_is_too_long(tmp_path):
    tensors = {"a": torch.zeros(30)}
    stio.sync.save(tensors, tmp_path / "0")
    for step in range(1, MAX_LINKS + 1):
        stio.sync.save(tensors, tmp_path / str(step), base=tmp_path / str(step - 1), durability="none")
    with pytest.raises(ValueError, match=f"the last of {MAX_LINKS} deltas"):
        stio.sync.save(tensors, tmp_path / "more", base=tmp_path / str(MAX_LINKS))


def test_by_hand_a_plain_save_stays_the_same(tmp_path):
    tensors = state()
    for name in "ab":
        stio.sync.save(tensors, tmp_path / name)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert ID_KEY not in metadata_of(tmp_path / "a/model.safetensors")


@pytest.mark.anyio
async def test_by_hand_cancelled_at_any_time(tmp_path):
    tensors = state(num_tensors=3)
    await stio.save(tensors, tmp_path / "a")
    numbers = iter(range(10_000))

    async def body():
        await stio.save(tensors, tmp_path / f"b{next(numbers)}", base=tmp_path / "a")

    await cancelled_after_every_round(body)
    assert all(loads(path) for path in tmp_path.iterdir())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# What stays.


def steps_in(directory):
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


def test_the_bases_of_what_stays_stay(tmp_path):
    tensors, seen = {"a": torch.zeros(50)}, []
    with stio.sync.Saver(full_every=3, keep_last=1) as saver:
        for step in range(8):
            tensors["a"][step] = 1
            saver.save(tensors, tmp_path / f"step-{step}").result()
            seen.append(steps_in(tmp_path))
    assert seen == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [6], [6, 7]]


def test_keep_every_keeps_bases(tmp_path):
    tensors = {"a": torch.zeros(50)}
    with stio.sync.Saver(full_every=3, keep_last=1, keep_every=4) as saver:
        for step in range(10):
            tensors["a"][step] = 1
            saver.save(tensors, tmp_path / f"step-{step}").result()
    assert steps_in(tmp_path) == [0, 3, 4, 6, 7, 8, 9]


def test_a_run_that_went_back(tmp_path):
    tensors = {"a": torch.zeros(50)}
    kinds = []
    with stio.sync.Saver(full_every=9, keep_last=2, drop_higher=True) as saver:
        for step in (1, 5, 6, 2, 3):
            tensors["a"][step] = 1
            kinds.append(saver.save(tensors, tmp_path / f"step-{step}").result().kind)
    assert kinds == ["full", "delta", "delta", "full", "delta"]
    assert steps_in(tmp_path) == [2, 3]
    require_saved(tmp_path / "step-3", tensors)


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_adopted_steps(tmp_path, suffix):
    tensors = {"a": torch.zeros(50)}
    with stio.sync.Saver(full_every=3) as saver:
        for step in range(5):
            tensors["a"][step] = 1
            saver.save(tensors, tmp_path / f"step-{step}{suffix}").result()
    stio.sync.save(tensors, tmp_path / f"best{suffix}", base=tmp_path / f"step-4{suffix}")  # which is on step 3
    left = []
    with stio.sync.Saver(full_every=2, keep_last=2, adopt=tmp_path) as saver:
        for step in range(5, 8):
            tensors["a"][step] = 1
            saver.save(tensors, tmp_path / f"step-{step}{suffix}").result()
            left.append([step for step in range(8) if (tmp_path / f"step-{step}{suffix}").exists()])
    assert left == [[3, 4, 5], [3, 4, 5, 6], [3, 4, 5, 6, 7]]
    require_saved(tmp_path / f"step-7{suffix}", tensors)
    assert loads(tmp_path / f"best{suffix}")


@pytest.mark.parametrize("seed", range(count(2, 40)))
def test_random_walks_of_steps(tmp_path, seed):
    """What stays loads, is what was saved, and nothing else stays: against a model of the rules."""
    chance = random.Random(seed)
    full_every, keep_last, keep_every = chance.randint(1, 5), chance.randint(1, 3), chance.choice([None, 3, 4])
    tensors, saved, bases = {"a": torch.zeros(60), "b": torch.zeros(3)}, {}, {}
    last, step, depth = None, 0, 0
    with stio.sync.Saver(full_every=full_every, keep_last=keep_last, keep_every=keep_every) as saver:
        for _ in range(chance.randint(5, 20)):
            step += chance.randint(1, 2)
            tensors["a"][chance.randrange(60)] += 1
            if chance.random() < 0.1:
                tensors = {**tensors, f"more{step}": torch.zeros(2)}
                last = None
            place = "best" if "best" not in saved and chance.random() < 0.1 else f"step-{step}"
            result = saver.save(tensors, tmp_path / place, durability="none").result()
            is_delta = place != "best" and last is not None and depth + 1 < full_every
            assert result.kind == ("delta" if is_delta else "full"), (place, last, depth)
            bases[place] = last if is_delta else None
            saved[place] = copies(tensors)
            if place != "best":
                depth, last = depth + 1 if is_delta else 0, place
            steps = [one for one in saved if one != "best"]
            kept = {*steps[-keep_last:], *(["best"] if "best" in saved else [])}
            kept |= {one for one in steps if keep_every and int(one[5:]) % keep_every == 0}
            for one in [*kept]:
                while (one := bases[one]) is not None:
                    kept.add(one)
            assert {path.name for path in tmp_path.iterdir()} == kept
        for place in kept:
            require_saved(tmp_path / place, saved[place])
