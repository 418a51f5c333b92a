"""Files held against a manifest: what is judged, in which order, with how much memory, and how it ends."""

from __future__ import annotations

import errno
import hashlib
import json
import os

import pytest
from support import HookedRoot, nothing_left, ramp, save_sharded

from stio.errors import ChangedDuringReadError, IntegrityError, StorageError
from stio.format.files.manifest import FileState, Manifest
from stio.runtime import workers
from stio.runtime.operation import Cancelled
from stio.storage.checkpoint import integrity
from stio.storage.checkpoint.integrity import judge_files, read_manifest, verify_files
from stio.storage.checkpoint.open import open_checkpoint
from stio.storage.checkpoint.shards import OpenOptions

KIB = 1 << 10
NAMES = [f"model-{k + 1:05}-of-00004.safetensors" for k in range(4)]


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


@pytest.fixture
def root(tmp_path):
    directory = save_sharded({f"w{k}": ramp(5000 + k) for k in range(8)}, tmp_path / "m", 4)
    files = {}
    for path in directory.glob("*.safetensors"):
        content = path.read_bytes()
        files[path.name] = [{"nbytes": len(content), "digest": hashlib.sha256(content).hexdigest()}]
    document = {"version": 1, "algorithm": "sha256", "files": files}
    (directory / "model.safetensors.manifest.json").write_text(json.dumps(document))
    root = HookedRoot(directory)
    yield root
    root.close()


@pytest.fixture
def opened(root):
    opened = open_checkpoint(root, OpenOptions(with_manifest=True))
    yield opened
    opened.close()


def judged(opened, manifest=None, **options):
    manifest = manifest or read_manifest(opened)
    return judge_files(opened, manifest, check=lambda: None, to_the_end=True, **options)


def test_the_manifest_of_an_open_checkpoint(opened, root):
    assert opened.manifest.path == f"{root.path}/model.safetensors.manifest.json"
    assert opened.manifest.names == tuple(NAMES)
    assert len(opened.manifest.texts) == 1
    assert sorted(read_manifest(opened).files) == NAMES


def test_a_checkpoint_that_was_opened_without_its_manifest(root):
    opened = open_checkpoint(root)
    assert opened.manifest is None
    assert read_manifest(opened) is None
    with pytest.raises(IntegrityError, match="no manifest"):
        verify_files(opened)
    opened.close()
    assert not any("manifest" in name for name, _, _ in root.log)


def test_all_is_well(opened):
    verify_files(opened)
    assert [(finding.name, finding.error) for finding in judged(opened)] == [(name, None) for name in NAMES]


@pytest.mark.matrix
@pytest.mark.parametrize("cores", [1, 2, 64])
@pytest.mark.parametrize("budget_bytes", [1, 5000, 64 * KIB, 3 << 20, 1 << 40])
def test_any_budget_and_any_number_of_cores(opened, root, cores, budget_bytes, monkeypatch):
    monkeypatch.setattr("stio.storage.checkpoint.integrity.num_processors", lambda: cores)
    lengths = []
    root.hook = lambda name, offset, nbytes: lengths.append(nbytes)
    verify_files(opened, budget_bytes=budget_bytes)
    assert sum(lengths) == sum(file.identity.nbytes for file in opened.files)
    assert max(lengths) <= max(budget_bytes, 4096)


def test_to_the_end_every_file_is_judged(opened, root):
    """One is not named, one has another size, one cannot be read, one is as it should be."""
    manifest = read_manifest(opened)
    files = dict(manifest.files)
    del files[NAMES[0]]
    files[NAMES[1]] = (FileState(1, "0" * 64),)

    def hook(name, offset, nbytes):
        if name == NAMES[2]:
            raise StorageError("reading failed", errno=errno.EIO, path=name)

    root.hook = hook
    first, second, third, fourth = (f.error for f in judged(opened, Manifest("sha256", files)))
    assert isinstance(first, IntegrityError)
    assert isinstance(second, IntegrityError)
    assert isinstance(third, StorageError)
    assert fourth is None
    assert {name for name, offset, _ in root.log if name in NAMES[:2]} == set(NAMES[:2])  # their headers
    assert opened.files[0].data_bytes_read == opened.files[1].data_bytes_read == 0
    with pytest.raises(IntegrityError, match="does not name"):
        judge_files(opened, Manifest("sha256", files), check=lambda: None, to_the_end=False)


def test_the_size_must_be_that_of_the_same_state(opened):
    """A digest counts only with the size that stands beside it."""
    manifest = read_manifest(opened)
    (good,) = manifest.files[NAMES[0]]
    mixed = (FileState(good.nbytes, "0" * 64), FileState(good.nbytes + 1, good.digest))
    findings = judged(opened, Manifest("sha256", {**manifest.files, NAMES[0]: mixed}))
    assert isinstance(findings[0].error, IntegrityError)
    assert findings[0].error.expected == "0" * 64


def test_a_rewritten_file_is_one_finding(opened, root):
    def hook(name, offset, nbytes):
        if name == NAMES[3]:
            os.utime(f"{root.path}/{name}", ns=(1, 1))

    root.hook = hook
    *others, last = judged(opened)
    assert [finding.error for finding in others] == [None] * 3
    assert isinstance(last.error, ChangedDuringReadError)


@pytest.mark.parametrize("to_the_end", [False, True])
def test_a_cancel_at_every_check(opened, root, to_the_end, monkeypatch):
    monkeypatch.setattr(integrity, "PIECE_BYTES", 8 * KIB)
    manifest = read_manifest(opened)
    for n in range(1000):
        left = [n]

        def check(left=left):
            left[0] -= 1
            if left[0] < 0:
                raise Cancelled

        with nothing_left():
            try:
                judge_files(opened, manifest, check=check, to_the_end=to_the_end)
            except Cancelled:
                assert left[0] < 0
            assert not any(file.inside for file in opened.files)
        if left[0] >= 0:
            break
    assert 10 < n < 999


def test_no_memory(opened, monkeypatch):
    def allocate(nbytes):
        raise MemoryError("no")

    monkeypatch.setattr(integrity, "allocate", allocate)
    with pytest.raises(MemoryError):
        verify_files(opened)


def test_the_limit_of_threads(opened, monkeypatch):
    def refuse(run, *, name):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers, "start_thread", refuse)
    verify_files(opened)
