"""Saves of many ranks to a store: the objects of `stio.save` of the whole; one failure raised on all, nothing left."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from counts import count
from distributed.ranks import run_ranks
from fakes import MemoryDestination
from save_helpers import keys, uploads
from servers import s3_server
from test_load import new_model
from test_save import Failing, odd_tensors, patched, random_states, recorded_pools, spread_of, tensor_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard

import stio
from stio import sync
from stio.cli.main import main
from stio.device.copy_out import Readiness
from stio.device.describe import LazyTensor
from stio.distributed import sharded_write
from stio.distributed.plan_parts import Window
from stio.errors import CommitUncertainError, RankError
from stio.remote.folder import Folder
from stio.remote.save import RemoteTransaction, Uploads
from stio.remote.source import RemoteRoot

pytest.importorskip("obstore")

SMALL_BUDGET = 6 << 20
"""Windows of 84 KiB: several of each file."""


def environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def new_client() -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """Give a client for a bucket named "bucket", and the endpoint; one server for all ranks."""
    pytest.importorskip("moto")
    pytest.importorskip("boto3")
    with s3_server() as (client, endpoint), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"):
            patch.delenv(name, raising=False)
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield client, endpoint


class Place:
    """The ranks below a number, the bucket, and a folder for what one of them saves alone."""

    def __init__(self, folder: str, num_ranks: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self.group = dist.new_group(list(range(num_ranks)))
        self.is_member = dist.get_rank() < num_ranks
        self.client = new_client() if dist.get_rank() == 0 else None
        self.num_saves = 0

    def mesh(self, *shape: int) -> DeviceMesh:
        return DeviceMesh("cpu", torch.arange(self.num_ranks).reshape(shape or (self.num_ranks,)))

    def objects(self, path: str) -> dict[str, bytes]:
        prefix = path.removeprefix("s3://bucket/")
        names = [name for name in keys(self.client, prefix) if name == prefix or name.startswith(f"{prefix}/")]
        return {
            name.removeprefix(prefix).lstrip("/"): self.client.get_object(Bucket="bucket", Key=name)["Body"].read()
            for name in names
        }

    def same_objects(self, state: object, whole: object, *, name: str = "model", **options: Any) -> None:
        """Save, and compare with a local save of the whole."""
        if not self.is_member:
            return
        self.num_saves += 1
        path = f"{self.num_ranks}-{self.num_saves}/{name}"
        result = sync.distributed.save(state, f"s3://bucket/{path}", process_group=self.group, **options)
        if dist.get_rank() == 0:
            options.pop("budget_bytes", None)
            save: Any = sync.save if is_flat(whole) else sync.save_state
            expected = save(whole, f"{self.folder}/{path}", durability="none", **options)
            found = self.objects(f"s3://bucket/{path}")
            assert (result.path, result.total_bytes, result.file_bytes, result.aliases) == (
                f"s3://bucket/{path}", expected.total_bytes, expected.file_bytes, expected.aliases
            )  # fmt: skip
            assert list(result.hashes.values()) == list(expected.hashes.values())
            if name.endswith(".safetensors"):
                assert found.pop("") == Path(self.folder, path).read_bytes()
            else:
                names = dict(zip(result.files, expected.files, strict=True))
                for one, other in names.items():
                    assert found.pop(one) == Path(self.folder, path, other).read_bytes(), one
                index = json.loads(found.pop("model.safetensors.index.json"))
                assert set(index["weight_map"].values()) == (set(result.files) if whole else set())
                sync.load(f"s3://bucket/{path}", verify=bool(result.hashes))
            assert [one for one in found if "manifest" not in one] == []
            assert uploads(self.client) == []
        dist.barrier(self.group)

    same_files = same_objects  # for `random_states`


def is_flat(state: object) -> bool:
    return isinstance(state, dict) and all(isinstance(value, torch.Tensor | LazyTensor) for value in state.values())


def placements(place: Place) -> None:
    """Rows, columns, copies and plain tensors, odd sizes; several shards, one file."""
    mesh = place.mesh()  # a call of all ranks
    if not place.is_member:
        return
    tensors = odd_tensors()
    whole = tensors | {"plain": torch.arange(100.0), "scalar": torch.tensor(3.5)}
    cases: list[tuple[Placement, dict[str, Any]]] = [
        (Shard(0), {"max_shard_size": 200_000, "hash": "sha256", "budget_bytes": SMALL_BUDGET}),
        (Shard(1), {"name": "a.safetensors", "metadata": {"k": "v"}, "hash": "sha256", "budget_bytes": SMALL_BUDGET}),
        (Replicate(), {"max_shard_size": 100_000, "metadata": {"k": "v"}, "hash": "xxh3"}),
    ]
    for chosen, options in cases:
        spread: dict[str, torch.Tensor] = {
            name: spread_of(tensor.clone(), mesh, [chosen if tensor.dim() > 1 else Shard(0)])
            for name, tensor in tensors.items()
        }
        spread |= {name: whole[name].clone() for name in ("plain", "scalar")}
        place.same_objects(spread, whole, **options)


def other_states(place: Place) -> None:
    """No tensors; lazy ones; nested state; a model of `fully_shard`."""
    place.same_objects({}, {})
    lazy = {name: LazyTensor(torch.float32, (20,), torch.ones(20).clone) for name in ("a", "b")}
    place.same_objects(lazy, {name: torch.ones(20) for name in lazy})
    whole = tensor_of((300, 70), torch.float32, 1)
    place.same_objects(
        {"a": spread_of(whole.clone(), place.mesh(), [Shard(1)]), "b": [1, 2.5]}, {"a": whole, "b": [1, 2.5]}
    )
    model = new_model()
    fully_shard(model)
    place.same_objects(dict(model.state_dict()), dict(new_model().state_dict()))


def large(place: Place) -> None:
    """Uploads of several parts, within the budget."""
    whole = {f"w{k}": tensor_of((1500, 1024), torch.float32, k) for k in range(4)}
    spread = {name: spread_of(one.clone(), place.mesh(), [Shard(k % 2)]) for k, (name, one) in enumerate(whole.items())}
    with recorded_pools() as made:
        place.same_objects(spread, whole, budget_bytes=16 << 20, max_shard_size=15_000_000)
    assert 0 < made[0].peak_bytes <= 8 << 20


def over_an_old_checkpoint(place: Place) -> None:
    """Its shards and its manifest are deleted; a `RemoteRoot` is a destination too."""
    tensors = odd_tensors()
    spread = {name: spread_of(tensor.clone(), place.mesh(), [Shard(0)]) for name, tensor in tensors.items()}
    if dist.get_rank() == 0:
        sync.save(
            {"old": torch.ones(10_000), "older": torch.ones(10)},
            "s3://bucket/old",
            max_shard_size=20_000,
            hash="sha256",
        )
    dist.barrier()
    result = sync.distributed.save(spread, RemoteRoot("s3://bucket/old"), max_shard_size=100_000)
    if dist.get_rank() == 0:
        assert place.objects("s3://bucket/old").keys() == {*result.files, "model.safetensors.index.json"}
        loaded = sync.load("s3://bucket/old")
        assert all(torch.equal(loaded[name].view(torch.uint8), one.view(torch.uint8)) for name, one in tensors.items())


async def with_a_saver(place: Place) -> None:
    """The tensors change after the snapshot; old steps are deleted; a pending save is awaited or not."""
    whole = torch.arange(300_000.0).reshape(300, 1000)
    spread = {"w": spread_of(whole.clone(), place.mesh(), [Shard(1)]), "step": torch.zeros(1)}
    folder = "s3://bucket/steps"
    async with stio.distributed.Saver(keep_last=2, hash="sha256") as saver:
        for step in range(4):
            spread["w"].to_local().add_(1)
            spread["step"].fill_(step)
            save = await saver.save(spread, f"{folder}/step-{step}")
            assert save.staged
            with torch.no_grad():
                spread["w"].to_local().mul_(2)
            if step % 2:
                assert (await save).path == f"{folder}/step-{step}"
            with torch.no_grad():
                spread["w"].to_local().div_(2)
        await (await saver.save_state({"a": spread["w"], "b": [1, 2.5]}, f"{folder}/state-9.safetensors", hash=None))
    if dist.get_rank() == 0:
        steps = {name.split("/")[0] for name in place.objects(folder)}
        assert steps == {"step-3", "state-9.safetensors"}
        assert torch.equal((await stio.load(f"{folder}/step-3", verify=True))["w"], whole + 4)
        loaded = await stio.load_state(f"{folder}/state-9.safetensors")
        assert loaded["b"] == [1, 2.5] and torch.equal(loaded["a"], whole + 4)


# Failures.


def failing(owner: Any, name: str, error: Exception | None = None) -> Any:
    """Make a function fail at each call."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        raise error or OSError(errno.EIO, "a disk that fails")

    return patched(owner, name, call)


def failures(place: Place) -> dict[str, tuple[str, str, float]]:
    """Save over an old checkpoint, and fail in many places; return the errors. The old checkpoint must be there."""
    rank, mesh, path = dist.get_rank(), place.mesh(), "s3://bucket/kept"
    whole = {f"w{k}": tensor_of((400, 1024), torch.float32, k) for k in range(4)}
    spread = {name: spread_of(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    if rank == 0:
        sync.save({"old": torch.ones(3), "older": torch.zeros(2)}, path, max_shard_size=12)
    before = place.objects(path) if rank == 0 else {}
    found = {}

    def unchanged() -> None:
        dist.barrier()
        if rank == 0:
            assert place.objects(path) == before
            assert uploads(place.client) == []
        dist.barrier()

    def one_failure(
        text: str, state: object = spread, *, raised: Callable[[], None] = lambda: None, **options: Any
    ) -> tuple[str, str, float]:
        begin = time.monotonic()
        with pytest.raises((RankError, OSError, ValueError, LookupError), match=text) as caught:
            options = {"max_shard_size": 3_000_000, "budget_bytes": 12 << 20, **options}
            sync.distributed.save(state, path, **options)
        seconds = time.monotonic() - begin
        raised()
        unchanged()
        return type(caught.value).__name__, type(caught.value.__cause__).__name__, seconds

    def told_first() -> tuple[str, str, float]:
        """Rank 1 fails when it has uploaded its objects. Its deletions wait until rank 0 has raised."""
        store, delete = dist.distributed_c10d._get_default_store(), Folder.delete

        def delete_late(folder: Folder, names: Sequence[str]) -> None:
            store.wait(["rank 0 has raised"], timedelta(seconds=10))
            delete(folder, names)

        def raised() -> None:
            if rank == 0:
                store.set("rank 0 has raised", "")

        with ExitStack() as patches:
            if rank == 1:
                patches.enter_context(failing(Uploads, "leave"))
                patches.enter_context(patched(Folder, "delete", delete_late))
            return one_failure("a disk that fails|Input/output error", raised=raised)

    for name, who, owner, attribute in [
        ("begin", 0, Folder, "list"),
        ("stage", 1, Readiness, "copy_pieces"),
        ("upload", 1, Folder, "upload"),
        ("upload on the first", 0, Folder, "upload"),
        ("pack", 2, sharded_write, "_message"),
        ("assemble", 2, sharded_write, "_unpack"),
        ("receive", 2, sharded_write.Exchange, "_swap"),
        ("agree", 1, sharded_write.Exchange, "wait"),
        ("publish", 0, RemoteTransaction, "_put"),
    ]:
        with failing(owner, attribute) if rank == who else patched(owner, attribute, getattr(owner, attribute)):
            found[name] = one_failure("a disk that fails|Input/output error")
    found["told first"] = told_first()
    found["module"] = one_failure("a module that fails", Failing() if rank == 2 else spread)
    found["option"] = one_failure("the option hash differs", hash="sha256" if rank else "xxh3")
    found["refused"] = one_failure("a store has no renames", commit="files")
    asyncio.run(cancelled(path, spread, unchanged))
    uncertain = failing(RemoteTransaction, "_put", CommitUncertainError("no answer"))
    with uncertain if rank == 0 else patched(RemoteTransaction, "_put", RemoteTransaction._put):
        with pytest.raises((CommitUncertainError, RankError), match="no answer"):
            sync.distributed.save(spread, "s3://bucket/uncertain", max_shard_size=3_000_000)
    dist.barrier()
    if rank == 0:
        assert len(place.objects("s3://bucket/uncertain")) == 4, "the checkpoint may consist of them"
        for name in keys(place.client, "uncertain"):
            place.client.delete_object(Bucket="bucket", Key=name)
    return found


async def cancelled(path: str, spread: dict[str, Any], unchanged: Callable[[], None]) -> None:
    """One rank cancels while windows are sent: a task that waits for `save`, and a pending save."""
    rank, loop, began = dist.get_rank(), asyncio.get_running_loop(), asyncio.Event()
    assemble = sharded_write.Exchange._assemble

    def waits(*arguments: Any) -> None:
        loop.call_soon_threadsafe(began.set)
        assemble(*arguments)

    with patched(sharded_write.Exchange, "_assemble", waits):
        task = asyncio.ensure_future(stio.distributed.save(spread, path, max_shard_size=3_000_000))
        if rank == 1:
            await began.wait()
            task.cancel()
        begin = time.monotonic()
        with pytest.raises(asyncio.CancelledError if rank == 1 else RankError, match=None if rank == 1 else "rank 1"):
            await task
        assert time.monotonic() - begin < 5
        await asyncio.to_thread(unchanged)
        began.clear()
        async with stio.distributed.Saver(max_shard_size=3_000_000) as saver:
            save = await saver.save(spread, path)
            if rank == 2:
                await began.wait()
                save.cancel()
            with pytest.raises(stio.ClosedError if rank == 2 else RankError):
                await save
            await asyncio.to_thread(unchanged)
            await (await saver.save({"new": torch.ones(3)}, "s3://bucket/next"))


def everything(folder: str, endpoint: str) -> dict[str, Any]:
    """Do all that the tests look at: the start of a process costs more."""
    os.environ |= environment(endpoint)
    places = [Place(folder, num_ranks) for num_ranks in (1, 2, 3)]
    for place in places[count(2, 0) :]:
        placements(place)
    whole = places[-1]
    other_states(whole)
    large(whole)
    over_an_old_checkpoint(whole)
    asyncio.run(with_a_saver(whole))
    return {"saves": [place.num_saves for place in places], "failures": failures(whole)}


@pytest.fixture(scope="module")
def found(s3: tuple[Any, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of three ranks has found."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(everything, 3, folder, str(folder), s3[1])


@pytest.mark.slow
def test_objects_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    """At 2 and 3 ranks, in `make nightly` at 1 too; the comparison is in the ranks."""
    assert found[0]["saves"] == [count(0, 3), count(0, 3), 8]


@pytest.mark.slow
def test_one_failure_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    """With its cause, and soon: 0.5 s on a free machine. The old checkpoint is unchanged, and nothing is beside it."""
    for name in found[0]["failures"]:
        outcomes = [one["failures"][name] for one in found]
        own = [kind for kind, _, _ in outcomes if kind != "RankError"]
        assert own, name
        assert {cause for kind, cause, _ in outcomes if kind == "RankError"} <= set(own), (name, outcomes)
        assert max(seconds for _, _, seconds in outcomes) < 5, (name, outcomes)


def test_what_is_no_store() -> None:
    with pytest.raises(ValueError, match="to a path on a filesystem that they share, or to a URL of s3, gs or az"):
        sync.distributed.save({"w": torch.ones(2)}, MemoryDestination())


def test_windows_fit_the_budget() -> None:
    root = RemoteRoot("s3://bucket/x", config={"skip_signature": "true", "region": "us-east-1"})
    store = sharded_write.Store(sharded_write.RemoteDestination(root))
    for budget_bytes in (6 << 20, 64 << 20, 1 << 30):
        smaller, nbytes = store.within(budget_bytes)
        assert nbytes == smaller.inner.buffer_bytes + sharded_write.NUM_WINDOWS * smaller.window_bytes < budget_bytes
        assert smaller.window_bytes <= sharded_write.WINDOW_BYTES


@pytest.mark.slow
def test_random_states(s3: tuple[Any, str], tmp_path: Path) -> None:
    """Many random meshes, placements, shapes and dtypes, on 1 to 4 ranks."""
    run_ranks(many_random_states, 4, tmp_path, str(tmp_path), s3[1], 12)


def many_random_states(folder: str, endpoint: str, num_random: int) -> None:
    os.environ |= environment(endpoint)
    for place in [Place(folder, num_ranks) for num_ranks in (1, 2, 3, 4)]:
        random_states(place, range(1000 * place.num_ranks, 1000 * place.num_ranks + num_random))


# A rank that is killed.


def end_here(death: str, how: signal.Signals = signal.SIGKILL) -> None:
    """End or stop this process, and leave the time."""
    Path(death).write_text(str(time.time()))
    os.kill(os.getpid(), how)


def killed(endpoint: str, death: str, victim: int, moment: str) -> tuple[str, str, float]:
    """Save over an old checkpoint; one rank ends while it uploads, or before it agrees to the commit."""
    os.environ |= environment(endpoint)
    rank, path = dist.get_rank(), f"s3://bucket/killed-{victim}-{moment}"
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    spread = {f"w{k}": spread_of(torch.ones(2500, 1024), mesh, [Shard(0)]) for k in range(3)}
    if rank == 0:
        sync.save({"old": torch.ones(3), "older": torch.zeros(2)}, path, max_shard_size=12)
    dist.barrier()
    assemble, client = sharded_write.Exchange._assemble, new_client()

    def assemble_and_end(exchange: Any, window: Window, messages: Any) -> None:
        if window.begin:
            name = exchange._writers[window.file].name
            while not any(key.endswith(name) for key in uploads(client)):  # the first part is on its way
                time.sleep(0.01)
            end_here(death, signal.SIGSTOP if moment == "stop" else signal.SIGKILL)
        assemble(exchange, window, messages)

    if rank == victim and moment in ("upload", "stop"):
        sharded_write.Exchange._assemble = assemble_and_end
    elif rank == victim:
        sharded_write.Exchange.digests = lambda *_: end_here(death)
    with pytest.raises(RankError) as caught:
        sync.distributed.save(spread, path, max_shard_size=11_000_000, hash="sha256", rank_timeout=2.0)
    return type(caught.value).__name__, str(caught.value), time.time() - float(Path(death).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "moment", "text", "num_left"),
    [
        (1, "upload", "rank 1", 1),
        pytest.param(1, "stop", "rank 1 gave no sign of life for 2 s", 1, marks=pytest.mark.slow),
        pytest.param(1, "commit", "rank 1 gave no sign of life for 2 s", 0, marks=pytest.mark.slow),
        pytest.param(0, "upload", "does not answer", 1, marks=pytest.mark.slow),
        pytest.param(0, "commit", "does not answer", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_leaves_the_old_checkpoint(
    s3: tuple[Any, str], tmp_path: Path, victim: int, moment: str, text: str, num_left: int
) -> None:
    """The others raise, and delete what they have uploaded; `stio gc` removes what the killed rank has left.

    An object that it has completed is deleted by the first rank, if that lives.
    """
    client, endpoint = s3
    results = run_ranks(killed, 3, tmp_path, endpoint, f"{tmp_path}/death", victim, moment, killed=[victim])
    assert results[victim] is None
    for kind, message, seconds in (result for result in results if result is not None):
        assert kind == "RankError" and text in message and seconds < 4, (message, seconds)
    prefix = f"killed-{victim}-{moment}/"
    assert sync.load(f"s3://bucket/{prefix}")["old"].tolist() == [1, 1, 1]
    assert len(keys(client, prefix)) - 3 + len(uploads(client)) == num_left
    done = CliRunner().invoke(main, ["gc", f"s3://bucket/{prefix}", "--max-age", "0"])
    assert done.exit_code == 0, done.output
    assert sync.load(f"s3://bucket/{prefix}")["old"].tolist() == [1, 1, 1]
    assert len(keys(client, prefix)) == 3
    assert uploads(client) == []


def killed_at_some_time(endpoint: str, death: str, victim: int, moment: float, path: str) -> tuple[str, float]:
    """Save over an old checkpoint; one rank ends at a moment, a multiple of the time that such a save takes."""
    os.environ |= environment(endpoint)
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    spread = {f"w{k}": spread_of(torch.full((2500, 1024), 7.0), mesh, [Shard(0)]) for k in range(4)}
    if dist.get_rank() == 0:
        sync.save({"old": torch.ones(3), "older": torch.zeros(2)}, path, max_shard_size=12)
    dist.barrier()
    begin = time.monotonic()
    sync.distributed.save(spread, f"{path}-first", max_shard_size=11_000_000)
    seconds = moment * (time.monotonic() - begin)
    dist.barrier()
    if dist.get_rank() == victim:
        threading.Timer(seconds, end_here, [death]).start()
    outcome = "saved"
    try:
        sync.distributed.save(spread, path, max_shard_size=11_000_000, rank_timeout=2.0)
    except RankError as error:
        outcome = str(error)
    ended = time.time()
    if dist.get_rank() == victim:
        threading.Event().wait()
    while not os.path.exists(death):
        time.sleep(0.01)
    return outcome, ended - float(Path(death).read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_at_random_moments(s3: tuple[Any, str], tmp_path: Path) -> None:
    """The old or the new checkpoint is there, whole; the new one if a rank was told so. `stio gc` removes the rest."""
    client, endpoint = s3
    chance = random.Random(5)
    outcomes = []
    for number in range(10):
        victim, moment = chance.randrange(3), chance.uniform(0, 1.6)
        path, folder = f"s3://bucket/random-{number}", tmp_path / f"{number}"
        folder.mkdir()
        arguments = (endpoint, f"{folder}/death", victim, moment, path)
        results = run_ranks(killed_at_some_time, 3, folder, *arguments, killed=[victim])
        survivors = [result for result in results if result is not None]
        assert max(late for _, late in survivors) < 4, (number, results)
        loaded = sync.load(path)
        is_new = loaded.keys() == {"w0", "w1", "w2", "w3"}
        assert is_new or loaded["old"].tolist() == [1, 1, 1]
        assert not is_new or all(bool((tensor == 7).all()) for tensor in loaded.values())
        assert is_new or all(outcome != "saved" for outcome, _ in survivors), (number, results)
        done = CliRunner().invoke(main, ["gc", path, "--max-age", "0"])
        assert done.exit_code == 0, done.output
        assert len(keys(client, f"random-{number}/")) == (5 if is_new else 3)
        assert uploads(client) == []
        outcomes.append((victim, moment, is_new, survivors))
    assert {is_new for _, _, is_new, _ in outcomes} == {False, True}, outcomes
