"""Google Cloud Storage, by a server that answers like it: no test uses the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gcs_server import GcsServer, gcs_server
from save_helpers import generation, same
from servers import new_certificate

import stio
from stio.errors import ChangedDuringReadError, CheckpointNotFoundError, ConcurrentSaveError
from stio.remote.save import RemoteDestination
from stio.remote.source import RemoteRoot
from stio.testing import read_guarded


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[GcsServer]:
    authority, certificate = new_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", authority)
    with gcs_server(certificate) as server:
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", server.key)
        yield server


@pytest.mark.slow
def test_a_file_that_is_replaced(gcs: GcsServer) -> None:
    stio.sync.save(generation(1, 1 << 20), "gs://bucket/a/x.safetensors")
    root = RemoteRoot("gs://bucket/a")
    assert root.listdir() == ["x.safetensors"]
    source = root.open("x.safetensors")
    assert read_guarded(source, 3 << 20, 1000) == gcs.objects["a/x.safetensors"].data[3 << 20 :][:1000]
    source.check_unchanged()
    stio.sync.save(generation(2, 1 << 20), "gs://bucket/a/x.safetensors")
    with pytest.raises(ChangedDuringReadError):
        read_guarded(source, 3 << 20, 1000)
    with pytest.raises(ChangedDuringReadError):
        source.check_unchanged()
    with pytest.raises(CheckpointNotFoundError):
        root.open("y.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("url", ["gs://bucket/m", "gs://bucket/x.safetensors"])
def test_a_new_checkpoint_over_an_old_one(gcs: GcsServer, url: str) -> None:
    for number in (1, 2):
        tensors = {"w": torch.full((3 << 20,), float(number)), "v": torch.ones(3)}
        stio.sync.save(tensors, url, max_shard_size=None if "." in url else 9 << 20)
        assert same(stio.sync.load(url), tensors)
    assert len(gcs.objects) == (1 if "." in url else 3)
    assert gcs.uploads == {}


def test_of_two_saves_at_one_time_the_later_commit_is_refused(gcs: GcsServer) -> None:
    stio.sync.save(generation(1), "gs://bucket/m")
    transaction = RemoteDestination(RemoteRoot("gs://bucket/m")).begin(num_shards=1)
    stio.sync.save(generation(2), "gs://bucket/m")
    num_refused = gcs.num_refused
    with pytest.raises(ConcurrentSaveError):
        transaction.commit(index=b"{}")
    assert gcs.num_refused > num_refused  # by the generation, which Google compares
    assert same(stio.sync.load("gs://bucket/m"), generation(2))


@pytest.mark.slow
def test_keep_last_deletes_what_is_older(gcs: GcsServer) -> None:
    with stio.sync.Saver(keep_last=2) as saver:
        for step in (1, 2, 3):
            saver.save(generation(step), f"gs://bucket/step-{step}/").result()
    assert {name.partition("/")[0] for name in gcs.objects} == {"step-2", "step-3"}
    assert same(stio.sync.load("gs://bucket/step-3"), generation(3))


def test_a_save_that_fails_leaves_nothing(gcs: GcsServer) -> None:
    def fail() -> torch.Tensor:
        raise ZeroDivisionError

    stio.sync.save(generation(1), "gs://bucket/m")
    before = dict(gcs.objects)
    late = stio.LazyTensor(torch.float32, (5,), fail)
    with pytest.raises(ZeroDivisionError):
        stio.sync.save({"a": torch.zeros(3 << 20), "b": late}, "gs://bucket/m", max_shard_size=9 << 20)
    assert (gcs.objects, gcs.uploads) == (before, {})
