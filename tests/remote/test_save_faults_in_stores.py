"""Saves to stores beside other writers, and what they leave: other programs, a second save, kills, a store without rules."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from proxy import Broken, Proxy
from save_helpers import IMPATIENT, generation, keys, same, uploads
from servers import Fault, HttpServer
from support import eventually

import stio
from stio.cli.main import main
from stio.errors import (
    CheckpointNotFoundError,
    CommitUncertainError,
    ConcurrentSaveError,
    StorageError,
)
from stio.remote import save as remote_save
from stio.remote.folder import Folder
from stio.remote.source import RemoteRoot

pytestmark = pytest.mark.usefixtures("_no_uploads")

INDEX = "model.safetensors.index.json"


def impatient(url: str, name: str = "") -> remote_save.RemoteDestination:
    return remote_save.RemoteDestination(RemoteRoot(url, patience=IMPATIENT), name)


def gc(*words: str) -> str:
    done = CliRunner().invoke(main, ["gc", *words])
    assert done.exit_code == 0, done.output
    return done.output


def before_the_commit(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Do something once, when a save has uploaded everything."""
    plain = remote_save.RemoteTransaction.commit

    def commit(self: Any, **values: Any) -> None:
        monkeypatch.setattr(remote_save.RemoteTransaction, "commit", plain)
        action()
        plain(self, **values)

    monkeypatch.setattr(remote_save.RemoteTransaction, "commit", commit)


# What readers see before the commit.


@pytest.mark.slow
def test_shards_that_no_index_names_are_no_checkpoint(s3: Any) -> None:
    stio.sync.save(generation(1), "s3://bucket/m", max_shard_size=9000)
    shards = [key for key in keys(s3) if not key.endswith(".json")]
    s3.delete_object(Bucket="bucket", Key=f"m/{INDEX}")
    for shard in shards[1:]:
        s3.delete_object(Bucket="bucket", Key=shard)
    with pytest.raises(CheckpointNotFoundError, match="without their index"):
        stio.sync.load("s3://bucket/m")


@pytest.mark.slow
def test_a_save_under_way_beside_a_file_of_another_program(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stio.sync.save(generation(1), tmp_path / "model.safetensors")
    s3.upload_file(str(tmp_path / "model.safetensors"), "bucket", "m/model.safetensors")
    found: list[Any] = []
    before_the_commit(monkeypatch, lambda: found.append(stio.sync.load("s3://bucket/m")))
    stio.sync.save(generation(2), "s3://bucket/m")
    assert same(found[0], generation(1))
    assert same(stio.sync.load("s3://bucket/m"), generation(2))


@pytest.mark.slow
def test_the_old_checkpoint_of_one_file_is_not_read(s3: Any, proxy: Proxy) -> None:
    with stio.sync.Saver(keep_last=1) as saver:
        for step in (1, 2, 3):
            saver.save({"w": torch.ones(1 << 20)}, f"s3://bucket/step-{step}.safetensors").result()
        saver.save({"w": torch.ones(1 << 20)}, "s3://bucket/step-3.safetensors").result()
    assert proxy.answered_bytes < 1 << 20
    assert keys(s3) == ["step-3.safetensors"]


# What others have written stays.


def test_what_another_program_puts_during_a_save_stays(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model.safetensors", "model-00001-of-00001.safetensors"):
        s3.put_object(Bucket="bucket", Key=f"m/{name}", Body=b"old")
    before_the_commit(
        monkeypatch, lambda: s3.put_object(Bucket="bucket", Key="m/model.safetensors", Body=b"of another program")
    )
    stio.sync.save(generation(1), "s3://bucket/m")
    left = keys(s3)
    assert "m/model.safetensors" in left
    assert "m/model-00001-of-00001.safetensors" not in left


@pytest.mark.matrix
@pytest.mark.parametrize("hash", [None, "sha256"])
def test_keep_last_leaves_a_manifest_that_it_has_not_written(s3: Any, hash: Any) -> None:
    with stio.sync.Saver(keep_last=1, hash=hash) as saver:
        saver.save(generation(1), "s3://bucket/step-1").result()
        s3.put_object(Bucket="bucket", Key="step-1/model.safetensors.manifest.json", Body=b"{}")
        saver.save(generation(2), "s3://bucket/step-2").result()
    assert keys(s3, "step-1/") == ["step-1/model.safetensors.manifest.json"]


def test_keep_last_deletes_the_index_before_the_shards(s3: Any, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """An index that cannot be deleted keeps its shards; the next save tries it again."""
    refused: list[Broken] = ["refused"]

    def answer(number: int, method: str, path: str) -> Broken | None:
        is_index = method == "POST" and path.endswith("?delete") and INDEX.encode() in proxy.bodies[number]
        return refused[0] if is_index and refused else None

    proxy.fault = answer
    with stio.sync.Saver(keep_last=1) as saver:
        for step in (1, 2):
            saver.save(generation(step), impatient(f"s3://bucket/step-{step}"), max_shard_size=9000).result()
        assert same(stio.sync.load("s3://bucket/step-1"), generation(1))
        assert "could not be deleted" in caplog.text
        refused.clear()
        saver.save(generation(3), impatient("s3://bucket/step-3"), max_shard_size=9000).result()
    assert {key.split("/")[0] for key in keys(s3)} == {"step-3"}


@pytest.mark.slow
def test_keep_last_deletes_what_was_committed_without_an_answer(s3: Any, proxy: Proxy) -> None:
    """Also where all attempts of obstore had no answer."""
    proxy.fault = lambda k, method, path: "cut after" if method == "PUT" and "step-1" in path else None
    with stio.sync.Saver(keep_last=1) as saver:
        saver.save(generation(1), impatient("s3://bucket", "step-1.safetensors")).result()
        saver.save(generation(2), impatient("s3://bucket", "step-2.safetensors")).result()
    assert keys(s3) == ["step-2.safetensors"]


@pytest.mark.slow
def test_names_that_begin_alike(s3: Any) -> None:
    with stio.sync.Saver(keep_last=1) as saver:
        for step in (10, 1, 100):
            saver.save(generation(step), f"s3://bucket/step-{step}").result()
    assert {key.split("/")[0] for key in keys(s3)} == {"step-100"}
    s3.put_object(Bucket="bucket", Key="step-1000/model-0123456789abcdef-00001-of-00001.safetensors", Body=b"x")
    assert "no save was interrupted" in gc("s3://bucket/step-100", "--max-age", "0")


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["", "a b+c%20é#?&=/~{x}", "m's (1)*"])
def test_names_with_odd_characters_and_none(s3: Any, folder: str) -> None:
    url = f"s3://bucket/{folder}".rstrip("/")
    prefix = f"{folder}/" if folder else ""
    left = f"{prefix}model-0123456789abcdef-00001-of-00002.safetensors"
    with stio.sync.Saver(hash="sha256") as saver:
        for number in (1, 2):
            saver.save(generation(number), url, max_shard_size=9000).result()
            assert same(stio.sync.load(url, verify=True), generation(number))
    before = keys(s3)
    assert len(before) == 4
    s3.put_object(Bucket="bucket", Key=left, Body=b"left")
    s3.create_multipart_upload(Bucket="bucket", Key=left)
    output = gc(url, "--max-age", "0")
    assert output.count(left) == 2
    assert (keys(s3), uploads(s3)) == (before, [])


@pytest.mark.matrix
@pytest.mark.parametrize("key", ["a//b", "a/../b", "a\tb"])
def test_names_that_no_object_has(s3: Any, key: str) -> None:
    for act in (stio.sync.load, lambda url: stio.sync.save(generation(1), url)):
        with pytest.raises(StorageError, match="the name of the object is not allowed; use another one"):
            act(f"s3://bucket/{key}/x.safetensors")
    assert keys(s3) == []


# Two saves, and the answer to the commit.


@pytest.mark.slow
def test_the_index_was_deleted_during_a_save(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stio.sync.save(generation(1), "s3://bucket/m")
    before_the_commit(monkeypatch, lambda: s3.delete_object(Bucket="bucket", Key=f"m/{INDEX}"))
    with pytest.raises(ConcurrentSaveError, match="another save changed the destination"):
        stio.sync.save(generation(2), "s3://bucket/m")
    assert len(keys(s3)) == 1  # the shard of the first


@pytest.mark.slow
def test_another_save_replaces_a_commit_without_an_answer(s3: Any, proxy: Proxy) -> None:
    """The checkpoint of the other one stays whole."""
    direct = RemoteRoot("s3://bucket/m", config={"endpoint": f"http://127.0.0.1:{proxy.port}"})
    commits: list[int] = []

    def answer(number: int, method: str, path: str) -> Broken | None:
        if method == "PUT" and path.endswith(INDEX):
            commits.append(number)
            return "cut after" if len(commits) == 1 else None
        if len(commits) == 1 and method == "GET" and path.endswith(INDEX):
            commits.append(number)
            stio.sync.save(generation(2), direct)
        return None

    proxy.fault = answer
    with pytest.raises(ConcurrentSaveError):
        stio.sync.save(generation(1), RemoteRoot("s3://bucket/m", patience=IMPATIENT))
    assert same(stio.sync.load(direct), generation(2))
    assert len(keys(s3)) == 2


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["expired", "conflict"])
def test_a_commit_that_the_store_has_not_tried_is_repeated(s3: Any, proxy: Proxy, fault: Broken) -> None:
    faults = iter([fault])
    proxy.fault = lambda k, method, path: next(faults, None) if method == "PUT" and path.endswith(INDEX) else None
    stio.sync.save(generation(1), impatient("s3://bucket/m"))
    assert same(stio.sync.load("s3://bucket/m"), generation(1))


@pytest.mark.slow
def test_a_commit_without_an_answer_whose_repetition_is_refused(s3: Any, proxy: Proxy) -> None:
    """The first put may arrive later, so nothing is rolled back."""
    stio.sync.save(generation(1), "s3://bucket/m")
    faults: Iterator[Broken] = iter(["cut before"])
    before = keys(s3)
    proxy.fault = lambda k, method, path: next(faults, "expired") if method == "PUT" and path.endswith(INDEX) else None
    with pytest.raises(CommitUncertainError, match="does not say whether"):
        stio.sync.save(generation(2), impatient("s3://bucket/m"))
    assert len(keys(s3)) == len(before) + 1
    assert same(stio.sync.load("s3://bucket/m"), generation(1))


@pytest.mark.slow
def test_a_manifest_without_an_answer_is_no_uncertain_commit(s3: Any, proxy: Proxy) -> None:
    """The index was not put: the save has failed, and is rolled back."""
    stio.sync.save(generation(1), "s3://bucket/m", hash="sha256")
    before = keys(s3)
    proxy.fault = lambda k, method, path: "cut before" if method == "PUT" and path.endswith(".manifest.json") else None
    with pytest.raises(StorageError) as caught:
        stio.sync.save(generation(2), impatient("s3://bucket/m"), hash="sha256")
    assert not isinstance(caught.value, CommitUncertainError)
    assert caught.value.path == "s3://bucket/m/model.safetensors.manifest.json"
    assert keys(s3) == before
    assert same(stio.sync.load("s3://bucket/m"), generation(1))


@pytest.mark.slow
@pytest.mark.parametrize("has_worked", [False, True])
def test_a_completion_without_an_answer_whose_upload_cannot_be_aborted(
    s3: Any, proxy: Proxy, small_parts: int, has_worked: bool
) -> None:
    """The store may complete it later, so it is not told as a failure."""
    tensors = {"w": torch.ones(11 << 18)}

    def answer(number: int, method: str, path: str) -> Broken | None:
        if "uploadId=" in path and method in ("POST", "DELETE"):
            return "cut after" if has_worked and method == "POST" else "cut before"
        return None

    proxy.fault = answer
    if has_worked:
        stio.sync.save(tensors, impatient("s3://bucket", "x.safetensors"))
        assert same(stio.sync.load("s3://bucket/x.safetensors"), tensors)
        return
    with pytest.raises(CommitUncertainError, match="does not say whether"):
        stio.sync.save(tensors, impatient("s3://bucket", "x.safetensors"))
    assert uploads(s3) == ["x.safetensors"]


# Leftovers.

ONE_SAVE = """
import sys
import torch, stio
stio.sync.save({"w": torch.zeros(17 << 18)}, sys.argv[1])
"""

IN_THE_BACKGROUND = """
import torch, stio
saver = stio.sync.Saver()
pending = saver.save({"w": torch.full((1000,), 7.0)}, "s3://bucket/m")
"""

NAMES = ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "NO_PROXY")


def child(zygote: Any, code: str, *words: object) -> Any:
    return zygote.start(code, *words, **{name: os.environ[name] for name in NAMES})


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3://bucket/m", "s3://bucket/m/x.safetensors"])
def test_c119_the_upload_of_a_killed_process_is_listed_and_aborted(
    s3: Any, proxy: Proxy, zygote: Any, place: str
) -> None:
    reached, opened = threading.Event(), threading.Event()

    def answer(number: int, method: str, path: str) -> Broken | None:
        if "partNumber=2" in path:
            reached.set()
            opened.wait(20)
        return None

    proxy.fault = answer
    running = child(zygote, ONE_SAVE, place)
    assert reached.wait(20)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    opened.set()
    (left,) = uploads(s3)
    assert keys(s3) == []
    other = "m/y.safetensors"  # of another program
    s3.create_multipart_upload(Bucket="bucket", Key=other)
    many_years = str(24 * 366 * 50)  # moto says of each upload that it began in 2010
    assert f"s3://bucket/{left}: left alone" in gc(place, "--max-age", many_years)
    assert f"s3://bucket/{left}: would be aborted, its upload was not completed" in gc(place, "--dry-run")
    assert uploads(s3) == sorted([left, other])
    assert f"s3://bucket/{left}: aborted, its upload was not completed" in gc(place)
    assert uploads(s3) == [other]
    assert "no save was interrupted" in gc(place)


def test_uploads_that_may_not_be_listed(s3: Any, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy.fault = lambda k, method, path: "expired" if "?uploads" in path else None
    assert "no save was interrupted" in gc("s3://bucket/m")
    assert "cannot be listed" in caplog.text
    assert "ExpiredToken" in caplog.text
    assert "AbortIncompleteMultipartUpload" in caplog.text
    assert "Signature" not in caplog.text


def test_a_store_that_lists_no_uploads(s3: Any, server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    server.fault = lambda number, request: Fault(status=501)
    root = RemoteRoot("s3://bucket/m", config={"endpoint": server.url})
    assert remote_save._uploads(Folder(root)) == []
    assert "cannot be listed" in caplog.text
    assert len(server.requests) == 1


def test_uploads_are_not_listed_without_boto3(
    s3: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert "no save was interrupted" in gc("s3://bucket/m")
    assert "cannot be listed (with boto3)" in caplog.text
    assert "AbortIncompleteMultipartUpload" in caplog.text


def test_an_upload_that_may_not_be_aborted(s3: Any, proxy: Proxy) -> None:
    s3.create_multipart_upload(Bucket="bucket", Key="m/x.safetensors")
    proxy.fault = lambda k, method, path: "expired" if method == "DELETE" else None
    with pytest.raises(StorageError, match="cannot be aborted: .*ExpiredToken"):
        impatient("s3://bucket/m", "x.safetensors").collect_unused(max_age_seconds=0)


def test_an_upload_that_has_ended_since_it_was_listed(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = s3.create_multipart_upload(Bucket="bucket", Key="m/x.safetensors")
    (listed,) = remote_save._uploads(Folder(RemoteRoot("s3://bucket/m")))
    s3.abort_multipart_upload(Bucket="bucket", Key="m/x.safetensors", UploadId=upload["UploadId"])
    listed.abort()


@pytest.mark.slow
def test_gc_beside_an_index_of_another_kind(s3: Any) -> None:
    stio.sync.save(generation(1), "s3://bucket/m")
    before = keys(s3)
    s3.put_object(Bucket="bucket", Key="m/other.index.json", Body=b"[]")
    left = "m/model-0123456789abcdef-00001-of-00002.safetensors"
    s3.put_object(Bucket="bucket", Key=left, Body=b"left")
    assert left in gc("s3://bucket/m", "--max-age", "0")
    assert keys(s3) == sorted([*before, "m/other.index.json"])
    s3.put_object(Bucket="bucket", Key=f"m/{INDEX}", Body=b"[]")
    assert CliRunner().invoke(main, ["gc", "s3://bucket/m", "--max-age", "0"]).exit_code != 0
    assert len(keys(s3)) == len(before) + 1


@pytest.mark.slow
def test_the_interpreter_ends_with_a_save_under_way(s3: Any, zygote: Any) -> None:
    assert child(zygote, IN_THE_BACKGROUND).wait().returncode == 0
    assert torch.equal(stio.sync.load("s3://bucket/m")["w"], torch.full((1000,), 7.0))


@pytest.mark.slow
def test_an_interrupt_in_an_upload(s3: Any, proxy: Proxy, zygote: Any) -> None:
    reached, opened = threading.Event(), threading.Event()

    def answer(number: int, method: str, path: str) -> Broken | None:
        if "partNumber=2" in path:
            reached.set()
            opened.wait(20)
        return None

    proxy.fault = answer
    running = child(zygote, ONE_SAVE, "s3://bucket/m")
    assert reached.wait(20)
    os.kill(running.pid, signal.SIGINT)
    opened.set()
    assert running.wait().returncode != 0
    assert eventually(lambda: not keys(s3) and not uploads(s3))


# What is missing.


@pytest.mark.matrix
@pytest.mark.parametrize("url", ["s3://nowhere/m", "s3://nowhere/m.safetensors", f"s3://nowhere/m/{INDEX}"])
def test_a_bucket_that_does_not_exist(s3: Any, url: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no such bucket or container; check the URL") as loading:
        stio.sync.load(url)
    assert "s3://nowhere/m" in str(loading.value)
    with pytest.raises(CheckpointNotFoundError, match="no such object: NoSuchKey"):
        stio.sync.load("s3://bucket/none.safetensors")
    if not url.endswith(".json"):
        with pytest.raises(StorageError, match="there is no such bucket or container; .*; or make it") as saving:
            stio.sync.save(generation(1), url)
        assert "s3://nowhere/m" in str(saving.value)
