"""Saves to stores: what is there after a success, a failure of any request, a cancel, a kill, a race."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from click.testing import CliRunner
from loops import on_all
from proxy import Broken, Proxy
from save_helpers import IMPATIENT, generation, keys, same, uploads
from support import eventually

import stio
from stio.cli.main import main
from stio.errors import CommitUncertainError, ConcurrentSaveError, StioError, StorageError
from stio.remote import folder as remote_folder
from stio.remote import save as remote_save
from stio.remote.source import RemoteRoot
from stio.storage.base import Note

pytestmark = pytest.mark.usefixtures("_no_uploads")

# What is there.


@pytest.mark.slow
@pytest.mark.anyio
@on_all
async def test_every_function_on_every_loop(s3: Any) -> None:
    result = await stio.save(generation(1), "s3://bucket/m/", max_shard_size=9000, hash="sha256")
    assert (result.path, len(result.files)) == ("s3://bucket/m", 2)
    assert keys(s3) == sorted(
        [*(f"m/{name}" for name in result.files), "m/model.safetensors.index.json", "m/model.safetensors.manifest.json"]
    )
    assert same(await stio.load("s3://bucket/m", verify=True), generation(1))
    state = {"step": 3, "model": generation(2)}
    await stio.save_state(state, "s3://bucket/state")
    assert (await stio.load_state("s3://bucket/state"))["step"] == 3
    async with stio.Saver() as saver:
        pending = await saver.save(generation(4), "s3://bucket/m/")
        assert (await pending).path == "s3://bucket/m"
    assert same(await stio.load("s3://bucket/m"), generation(4))


def test_a_checkpoint_replaces_the_old_one_and_nothing_else(s3: Any) -> None:
    for name in ("m/config.json", "m/other.safetensors", "m/sub/model.safetensors", "m2/model.safetensors"):
        s3.put_object(Bucket="bucket", Key=name, Body=b"mine")
    stio.sync.save(generation(1), "s3://bucket/m", max_shard_size=9000, hash="sha256")
    result = stio.sync.save(generation(2), "s3://bucket/m", max_shard_size=9000)
    mine = ["m/config.json", "m/other.safetensors", "m/sub/model.safetensors", "m2/model.safetensors"]
    assert keys(s3) == sorted([*mine, *(f"m/{name}" for name in result.files), "m/model.safetensors.index.json"])
    assert same(stio.sync.load("s3://bucket/m"), generation(2))


@pytest.mark.slow
def test_over_a_file_of_another_program(s3: Any, tmp_path: Path) -> None:
    """Readers of a directory prefer an index, so the file is replaced in one step too."""
    stio.sync.save(generation(1), tmp_path / "model.safetensors")
    s3.upload_file(str(tmp_path / "model.safetensors"), "bucket", "m/model.safetensors")
    assert same(stio.sync.load("s3://bucket/m"), generation(1))
    stio.sync.save(generation(2), "s3://bucket/m")
    assert same(stio.sync.load("s3://bucket/m"), generation(2))
    assert "m/model.safetensors" not in keys(s3)


@pytest.mark.matrix
@pytest.mark.parametrize("hash", [None, "sha256"])
def test_one_file(s3: Any, hash: Any) -> None:
    for number in (1, 2):
        result = stio.sync.save(generation(number), "s3://bucket/a/x.safetensors", hash=hash)
        assert (result.path, result.files) == ("s3://bucket/a/x.safetensors", ("x.safetensors",))
        assert same(stio.sync.load("s3://bucket/a/x.safetensors", verify=hash is not None), generation(number))
    manifest = ["a/x.safetensors.manifest.json"] if hash else []
    assert keys(s3) == ["a/x.safetensors", *manifest]


@pytest.mark.matrix
@pytest.mark.parametrize("place", ["s3://bucket/m", "s3://bucket/x.safetensors"])
@pytest.mark.parametrize("nbytes", [5 << 20, (5 << 20) + 4096, 17 << 20])
def test_parts(s3: Any, small_parts: int, place: str, nbytes: int) -> None:
    tensors = {"w": torch.arange(nbytes // 4, dtype=torch.int32), "v": torch.ones(3)}
    stio.sync.save(tensors, place, budget_bytes=8 << 20)
    assert same(stio.sync.load(place), tensors)
    assert uploads(s3) == []


def test_parts_grow_with_the_object() -> None:
    root = RemoteRoot("s3://bucket/x", config={"skip_signature": "true", "region": "us-east-1"})
    folder = remote_save.Folder(root)
    for nbytes in (1, 80 << 30, 5 << 40):
        part = remote_folder.Upload(folder, "x", nbytes, remote_folder.PartMemory())._part_bytes
        assert part >= min(nbytes, remote_folder.PART_BYTES)
        assert -(-nbytes // part) <= 10_000


@pytest.mark.matrix
@pytest.mark.parametrize("key", ["endpoint", "endpoint_url", "aws_endpoint_url", "AWS_ENDPOINT_URL_S3"])
def test_a_root_with_settings_is_a_destination(s3: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings go before the environment."""
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    root = RemoteRoot("s3://bucket/r", config={"region": "us-east-1", key: endpoint})
    stio.sync.save(generation(1), root)
    assert same(stio.sync.load(root), generation(1))


@pytest.mark.slow
def test_old_steps_are_deleted(s3: Any, caplog: pytest.LogCaptureFixture) -> None:
    with stio.sync.Saver(keep_last=2, hash="sha256") as saver:
        for step in range(4):
            saver.save(generation(step), f"s3://bucket/run/step-{step}").result()
            if step == 1:  # another program has replaced it, so it is not this saver's any more
                stio.sync.save(generation(9), "s3://bucket/run/step-1")
    with stio.sync.Saver(keep_last=2) as saver:
        for step in range(3):
            saver.save(generation(step), f"s3://bucket/files/step-{step}.safetensors").result()
    assert {key.split("/")[1] for key in keys(s3, "run/")} == {"step-1", "step-2", "step-3"}
    assert keys(s3, "run/step-0") == []
    assert same(stio.sync.load("s3://bucket/run/step-1"), generation(9))
    assert "step-1" in caplog.text
    assert "files/step-0.safetensors" not in keys(s3)


@pytest.mark.slow
def test_steps_here_and_in_a_store(s3: Any, tmp_path: Path) -> None:
    """Both parts of a step are deleted together."""
    with stio.sync.Saver(keep_last=1) as saver:
        for step in range(3):
            saver.save(generation(step), tmp_path / f"step-{step}").result()
            saver.save(generation(step), f"s3://bucket/step-{step}").result()
    assert os.listdir(tmp_path) == ["step-2"]
    assert {key.split("/")[0] for key in keys(s3)} == {"step-2"}


def test_a_conversion_into_a_store(s3: Any, tmp_path: Path) -> None:
    torch.save(generation(1), tmp_path / "w.pt")
    done = CliRunner().invoke(main, ["convert", str(tmp_path / "w.pt"), "s3://bucket/converted", "--no-progress"])
    assert done.exit_code == 0, done.output
    assert same(stio.sync.load("s3://bucket/converted"), generation(1))


@pytest.mark.slow
def test_a_conversion_of_an_object_into_itself_is_refused(s3: Any, tmp_path: Path) -> None:
    url = "s3://bucket/a b/m.safetensors"
    stio.sync.save(generation(1), url)
    for name in (url, "S3://bucket//a b/m.safetensors"):
        with pytest.raises(ValueError, match="is a file of the source; choose another name"):
            stio.sync.convert(url, name, dtype="float16")
    stio.sync.convert(url, "s3://bucket/other.safetensors")  # the advice
    assert same(stio.sync.load("s3://bucket/other.safetensors"), generation(1))


# What is refused.


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("place", "options", "kind", "words"),
    [
        ("s3://nowhere/m", {}, StorageError, "no such bucket"),
        ("s3://nowhere/m.safetensors", {}, StorageError, "no such bucket"),
        ("s3://", {}, StioError, "names no bucket"),
        ("s3://bucket/m", {"shard_names": "hub", "commit": "files"}, ValueError, "a store has no renames"),
        ("s3://bucket/m.pt", {}, ValueError, "another kind"),
        ("https://host/m", {}, ValueError, "not to https://host/m"),
        ("hf://me/model", {}, ValueError, "not to hf://me/model"),
        (Path("s3://bucket/m"), {}, ValueError, "the URL s3://bucket/m with a slash missing"),
        (Path("https://host/m"), {}, ValueError, "looks like a URL; saves go to local paths"),
    ],
)
def test_refused(s3: Any, place: Any, options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        stio.sync.save(generation(1), place, **options)
    assert keys(s3) == []


@pytest.mark.matrix
@pytest.mark.parametrize("place", ["s3://bucket/m", "s3://bucket/m.safetensors"])
def test_two_saves_at_one_time(s3: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that commits first is there; the other one says so, and leaves nothing."""
    stio.sync.save(generation(1), place)
    plain = remote_folder.Upload.finish

    def finish(self: Any) -> None:
        plain(self)
        monkeypatch.setattr(remote_folder.Upload, "finish", plain)
        stio.sync.save(generation(2), place)

    monkeypatch.setattr(remote_folder.Upload, "finish", finish)
    with pytest.raises(ConcurrentSaveError):
        stio.sync.save(generation(3), place)
    assert same(stio.sync.load(place), generation(2))
    assert len(keys(s3)) == (1 if place.endswith(".safetensors") else 2)


@pytest.mark.slow
def test_small_files_of_two_saves_at_one_time(s3: Any) -> None:
    """The one that changes them first goes on; the other one ends, and puts back what it has changed."""

    def content(name: str) -> bytes:
        data: bytes = s3.get_object(Bucket="bucket", Key=f"m/{name}")["Body"].read()
        return data

    destination = remote_save.RemoteDestination(RemoteRoot("s3://bucket/m"))
    one, two = (destination.begin(num_shards=1) for _ in range(2))
    assert one.read_note("note") is two.read_note("note") is None
    one.commit(index=b"one", notes=[Note("note", b"before", b"after")])
    with pytest.raises(ConcurrentSaveError):
        two.commit(index=b"two", notes=[Note("note", b"other", b"other")])
    assert content("note") == b"after"
    for before in (b"both", None):
        late = destination.begin(num_shards=1)
        assert late.read_note("note") == b"after"
        s3.put_object(Bucket="bucket", Key="m/model.safetensors.index.json", Body=b"of another save" + (before or b""))
        with pytest.raises(ConcurrentSaveError):
            late.commit(index=b"late", notes=[Note("note", before, b"mine")])
        assert content("note") == b"after"
    last = destination.begin(num_shards=1)
    assert last.read_note("note") == b"after"
    last.commit(index=b"last", notes=[Note("note", None, None)])
    assert keys(s3) == ["m/model.safetensors.index.json"]


# Failures.

CASES: list[tuple[Broken, bool]] = [
    ("refused", False),
    ("cut before", False),
    ("cut after", False),
    ("cut after", True),
]
FEW, MANY = {}, {"max_shard_size": 9000, "hash": "sha256"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["one shard", "shards"])
@pytest.mark.parametrize(("fault", "forever"), CASES)
def test_a_fault_at_every_request(s3: Any, proxy: Proxy, fault: Broken, forever: bool, options: dict[str, Any]) -> None:
    """The old checkpoint, or the new one; never an error that hides a new one, never another leftover than `gc` lists."""
    direct = RemoteRoot("s3://bucket/m", config={"endpoint": f"http://127.0.0.1:{proxy.port}"})
    stio.sync.save(generation(0), direct, **options)
    number, outcomes = 0, []
    while True:
        proxy.requests.clear()
        proxy.fault = lambda k, method, path, n=number: fault if k == n or (forever and k > n) else None
        began = time.monotonic()
        try:
            stio.sync.save(generation(number + 1), RemoteRoot("s3://bucket/m", patience=IMPATIENT), **options)
            outcome = "saved"
        except StioError as error:
            outcome = type(error).__name__
            assert "s3://bucket/m" in str(error)
        assert time.monotonic() - began < 15
        proxy.fault = lambda k, method, path: None
        found = stio.sync.load(direct)
        is_new = same(found, generation(number + 1))
        assert is_new or same(found, generation(number))
        assert is_new == (outcome == "saved") or outcome == "CommitUncertainError"
        remote_save.RemoteDestination(direct).collect_unused(max_age_seconds=0)
        kept = {key for key in keys(s3, "m/") if not key.endswith(".json")}
        assert len(kept) == (2 if options else 1), outcome
        outcomes.append(outcome)
        if len(proxy.requests) <= number:
            break
        if not is_new:  # for the next turn
            stio.sync.save(generation(number + 1), direct, **options)
        number += 1
    assert outcomes[-1] == "saved"
    assert number > 4
    if not forever:
        assert set(outcomes) == {"saved"}
    assert uploads(s3) == []


@pytest.mark.slow
def test_c119_an_interrupted_upload_is_aborted(s3: Any, proxy: Proxy, small_parts: int) -> None:
    proxy.fault = lambda k, method, path: "refused" if "partNumber=3" in path else None
    tensors = {"w": torch.zeros(17 << 18)}
    for place in ("m", "m/model.safetensors"):
        with pytest.raises(StorageError, match="save again later: SlowDown"):
            destination = RemoteRoot("s3://bucket/m", patience=IMPATIENT)
            name = place.partition("/")[2]
            stio.sync.save(tensors, remote_save.RemoteDestination(destination, name))
        assert uploads(s3) == []
        assert keys(s3) == []


def is_commit(method: str, path: str) -> bool:
    return method == "PUT" and path.endswith(".index.json")


@pytest.mark.slow
def test_c120_the_answer_to_the_commit_is_lost(s3: Any, proxy: Proxy) -> None:
    """The store is asked what it has."""
    for number, fault in enumerate(("cut after", "silent after", "cut before", "refused")):
        faults = iter([fault])
        proxy.fault = lambda k, method, path, faults=faults: next(faults, None) if is_commit(method, path) else None
        stio.sync.save(generation(number), RemoteRoot("s3://bucket/m", patience=IMPATIENT))
        assert same(stio.sync.load("s3://bucket/m"), generation(number))
    assert len(keys(s3)) == 2


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["cut before", "cut after"])
def test_c120_a_store_that_does_not_say_whether_it_has_the_commit(s3: Any, proxy: Proxy, fault: Broken) -> None:
    """Nothing is removed: the checkpoint may be there."""
    stio.sync.save(generation(1), "s3://bucket/m")
    committed: list[int] = []

    def answer(number: int, method: str, path: str) -> Broken | None:
        if is_commit(method, path):
            committed.append(number)
        return fault if committed else None

    proxy.fault = answer
    with pytest.raises(CommitUncertainError, match="does not say whether"):
        stio.sync.save(generation(2), RemoteRoot("s3://bucket/m", patience=IMPATIENT))
    proxy.fault = lambda number, method, path: None
    assert same(stio.sync.load("s3://bucket/m"), generation(2 if fault == "cut after" else 1))
    assert len(keys(s3)) == 3
    stio.sync.save(generation(3), "s3://bucket/m")
    assert len(keys(s3)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut after", "cut before"])
def test_c120_the_answer_to_the_completion_of_one_file_is_lost(
    s3: Any, proxy: Proxy, small_parts: int, fault: Broken
) -> None:
    """The object has the id of its save."""
    tensors = {"w": torch.ones(17 << 18)}
    faults = iter([fault])
    proxy.fault = lambda k, method, path: next(faults, None) if method == "POST" and "uploadId=" in path else None
    stio.sync.save(
        tensors,
        remote_save.RemoteDestination(
            RemoteRoot("s3://bucket", patience=replace(IMPATIENT, stall_seconds=10)), "x.safetensors"
        ),
    )
    assert same(stio.sync.load("s3://bucket/x.safetensors"), tensors)


# Cancels.


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("held", ["a part", "the first list", "the commit's parts"])
async def test_a_cancel_leaves_nothing(s3: Any, proxy: Proxy, small_parts: int, held: str) -> None:
    """It is heard within a second, and the upload is aborted in the background."""
    reached, opened = threading.Event(), threading.Event()

    def answer(number: int, method: str, path: str) -> Broken | None:
        wanted = {"a part": "partNumber=2", "the first list": "list-type", "the commit's parts": "partNumber=4"}[held]
        if wanted in path and not opened.is_set():
            reached.set()
            opened.wait(20)
        return None

    proxy.fault = answer
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stio.save, {"w": torch.zeros(17 << 18)}, "s3://bucket/m")
            assert await anyio.to_thread.run_sync(reached.wait, 10)
            began = time.monotonic()
            scope.cancel()
    assert time.monotonic() - began < 3
    opened.set()
    assert await anyio.to_thread.run_sync(eventually, lambda: not uploads(s3) and not keys(s3))


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_cancel_deletes_in_the_background(s3: Any, proxy: Proxy) -> None:
    """Also more objects than are deleted at one time."""
    reached, opened = threading.Event(), threading.Event()

    def answer(number: int, method: str, path: str) -> Broken | None:
        if method == "DELETE" or path.endswith("?delete") or "-00040-of-00040" in path:
            reached.set()
            opened.wait(20)
        return None

    proxy.fault = answer
    tensors = {f"w{k}": torch.zeros(1000) for k in range(40)}
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(stio.save, tensors, "s3://bucket/m", max_shard_size=4000))
            assert await anyio.to_thread.run_sync(reached.wait, 10)
            assert await anyio.to_thread.run_sync(eventually, lambda: len(keys(s3)) == 39)
            began = time.monotonic()
            scope.cancel()
    assert time.monotonic() - began < 3
    assert len(keys(s3)) == 39
    opened.set()
    assert await anyio.to_thread.run_sync(eventually, lambda: not uploads(s3) and not keys(s3))


# Kills.

SAVE_IN_TURN = """
import sys
import torch, stio
for number in range(int(sys.argv[1]), 10**6):
    tensors = {f"w{k}": torch.full((1000,), float(number * 10 + k)) for k in range(4)}
    stio.sync.save(tensors, "s3://bucket/m", max_shard_size=9000)
    print(number, flush=True)
"""


def killed(s3: Any, zygote: Any, num_kills: int, seed: int) -> None:
    """Kill processes that save one checkpoint after the other; there is always a whole one, of the last save or later."""
    chance = random.Random(seed)
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "NO_PROXY")
    environment = {name: os.environ[name] for name in names}
    last = 0
    stio.sync.save(generation(0), "s3://bucket/m", max_shard_size=9000)
    for _ in range(num_kills):
        child = zygote.start(SAVE_IN_TURN, last + 1, **environment)
        until = time.monotonic() + 20
        while not child.stdout() and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        done = child.wait()
        assert done.returncode == -signal.SIGKILL
        told = int(done.stdout.split()[-1])
        found = int(stio.sync.load("s3://bucket/m")["w0"][0]) // 10
        assert found in (told, told + 1), "a save that was told as durable is there"
        assert same(stio.sync.load("s3://bucket/m"), generation(found))
        last = found
    index = json.loads(s3.get_object(Bucket="bucket", Key="m/model.safetensors.index.json")["Body"].read())
    report = remote_save.RemoteDestination(RemoteRoot("s3://bucket/m")).collect_unused(max_age_seconds=0)
    assert len(report.unused) <= 4 * num_kills
    assert keys(s3) == sorted(
        [*(f"m/{name}" for name in {*index["weight_map"].values()}), "m/model.safetensors.index.json"]
    )
    assert same(stio.sync.load("s3://bucket/m"), generation(last))


@pytest.mark.slow
def test_kills_at_any_time(s3: Any, zygote: Any) -> None:
    killed(s3, zygote, 6, seed=1)


@pytest.mark.slow
def test_200_kills(s3: Any, zygote: Any) -> None:
    killed(s3, zygote, 200, seed=2)


@pytest.mark.slow
def test_gc(s3: Any) -> None:
    stio.sync.save(generation(1), "s3://bucket/m")
    stio.sync.save(generation(1), "s3://bucket/m", filename_pattern="ema{suffix}.safetensors")
    before = keys(s3)
    left = "m/model-0123456789abcdef-00001-of-00002.safetensors"
    for key in (left, "m/other.safetensors", "m/sub/model-0123456789abcdef-00001-of-00001.safetensors"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"left")
    everything = keys(s3)

    def gc(*words: str) -> str:
        done = CliRunner().invoke(main, ["gc", "s3://bucket/m", *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert f"s3://bucket/{left}: left alone" in gc()
    assert f"s3://bucket/{left}: would be deleted, no index names it" in gc("--max-age", "0", "--dry-run")
    assert keys(s3) == everything
    assert json.loads(gc("--max-age", "0", "--json"))["unused"] == [f"s3://bucket/{left}"]
    assert set(keys(s3)) == {*everything} - {left} >= {*before}
    assert gc() == "s3://bucket/m: no save was interrupted here\n"
