"""What an error keeps: 471, 472. Nothing in stio refers to an error that a caller has caught, nor to the caller's frames.

Each case raises in its own frame. The error refers to the frames that it passed, and these to their variables. When the
caller drops the error, all of them are gone at once: the collector is off.
"""

from __future__ import annotations

import gc
import re
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import eventually
from torch import nn

import stio
import stio.distributed
from stio import sync
from stio.cli.main import main
from stio.compat.safetensors import safe_open
from stio.compat.safetensors import torch as drop_in
from stio.distributed import StioStorageReader
from stio.process import contextmanager as contextmanager_of_stio
from stio.runtime.operation import Operation, copy_of
from stio.saving.staging_pool import StagingPool

pytestmark = pytest.mark.anyio

Case = Callable[[Path], Awaitable[object]]


class Local:
    """A variable of a caller."""


@contextmanager
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def catch(case: Case, folder: Path) -> tuple[str, list[object]]:
    """Return the type of a case's error, and what is left of the error and of a variable of its caller."""
    refs: list[weakref.ref[Any]] = []

    async def caller() -> str:
        local = Local()
        refs.append(weakref.ref(local))
        try:
            await case(folder)
        except (Exception, SystemExit) as error:
            with suppress(TypeError):  # errors of Python itself have no weak references
                refs.append(weakref.ref(error))
            return type(error).__name__
        return ""

    with collector_off():
        return await caller(), [left for ref in refs if (left := ref()) is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, folder / "ok.safetensors")
    (folder / "bad.safetensors").write_bytes(b"\xff" * 100)
    (folder / "cut.safetensors").write_bytes((folder / "ok.safetensors").read_bytes()[:-4])
    torch.save({"a": torch.ones(100)}, folder / "cut.pt")
    (folder / "cut.pt").write_bytes((folder / "cut.pt").read_bytes()[:-40])
    return folder


def _fail(*_: object) -> None:
    raise ValueError("a callback fails")


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


ONE = {"a": torch.ones(1)}


async def open_and_read(folder: Path) -> None:
    async with stio.open(folder / "ok.safetensors") as checkpoint:
        await checkpoint.read("no")


async def open_and_load_into(folder: Path) -> None:
    async with stio.open(folder / "ok.safetensors") as checkpoint:
        await checkpoint.load_into(nn.Linear(2, 2))


async def block_of_open(folder: Path) -> None:
    async with stio.open(folder / "ok.safetensors"):
        raise stio.StioError("of the caller")


async def stream(folder: Path) -> None:
    async with stio.open(folder / "ok.safetensors") as checkpoint:
        async for _ in checkpoint.stream("no"):
            pass


async def stream_again(folder: Path) -> None:
    async with stio.open(folder / "ok.safetensors") as checkpoint:
        pairs = checkpoint.stream("no")
        with suppress(stio.TensorNotFoundError):
            await anext(pairs)
        await anext(pairs)


async def block_of_stream(folder: Path) -> None:
    async with stio.open(folder / "ok.safetensors") as checkpoint, checkpoint.stream() as pairs:
        async for _ in pairs:
            raise stio.StioError("of the caller")


async def pending_awaited(folder: Path) -> None:
    async with stio.Saver() as saver:
        await (await saver.save(ONE, folder / "ok.safetensors" / "x"))


async def pending_result(folder: Path) -> None:
    async with stio.Saver() as saver:
        (await saver.save(ONE, folder / "ok.safetensors" / "x")).result()


async def pending_twice(folder: Path) -> None:
    async with stio.Saver() as saver:
        pending = await saver.save(ONE, folder / "ok.safetensors" / "x")
        with suppress(stio.StorageError):
            pending.result()
        await pending


async def saver_closed_with_failures(folder: Path) -> None:
    saver = stio.Saver(max_pending=2)
    await saver.save(ONE, folder / "ok.safetensors" / "x")
    await saver.save(ONE, folder / "ok.safetensors" / "y")
    await saver.aclose()


async def block_of_saver_with_failure(folder: Path) -> None:
    async with stio.Saver() as saver:
        await saver.save(ONE, folder / "ok.safetensors" / "x")


async def save_after_failure(folder: Path) -> None:
    saver = stio.Saver(max_pending=2)
    for name in "xyz":  # the failure of one is logged, and raised by the next
        pending = await saver.save(ONE, folder / "ok.safetensors" / name)
        await pending.ended()


async def block_of_saver(folder: Path) -> None:
    async with stio.Saver() as saver:
        await saver.save(ONE, folder / "saved")
        raise stio.StioError("of the caller")


async def save_of_no_tensor(folder: Path) -> None:
    async with stio.Saver() as saver:
        await saver.save({"a": 3}, folder / "saved")  # type: ignore[dict-item]


async def warm_start(folder: Path) -> None:
    async with stio.warm_start(_meta(), folder / "ok.safetensors") as load:
        await load.done()


async def warm_start_of_nothing(folder: Path) -> None:
    async with stio.warm_start(_meta(), folder / "no") as load:
        await load.done()


async def pool_use(folder: Path) -> None:
    async with stio.ModelPool(device="cpu", device_bytes="1GB") as pool:
        pool.add("m", folder / "bad.safetensors")
        async with pool.use("m"):
            pass


async def pool_update(folder: Path) -> None:
    async with stio.ModelPool(device="cpu", device_bytes="1GB") as pool:
        pool.add("m", folder / "ok.safetensors")
        await pool.update("m", folder / "bad.safetensors")


async def pool_prefetch(folder: Path) -> None:
    async with stio.ModelPool(device="cpu", device_bytes="1GB", host_bytes="1GB") as pool:
        pool.add("m", folder / "bad.safetensors")
        await pool.prefetch("m")


async def block_of_use(folder: Path) -> None:
    async with stio.ModelPool(device="cpu", device_bytes="1GB") as pool:
        pool.add("m", folder / "ok.safetensors")
        async with pool.use("m"):
            raise stio.StioError("of the caller")


async def cache_prefetch(folder: Path) -> None:
    async with stio.HostCache("1GB") as cache:
        await cache.prefetch(folder / "bad.safetensors")


async def saver_of_ranks(folder: Path) -> None:
    async with stio.distributed.Saver() as saver:
        await (await saver.save(ONE, folder / "ok.safetensors" / "x"))


ASYNCHRONOUS: dict[str, Case] = {
    "load nothing": lambda folder: stio.load(folder / "no"),
    "load no header": lambda folder: stio.load(folder / "bad.safetensors"),
    "load a cut file": lambda folder: stio.load(folder / "cut.safetensors"),
    "load with a callback": lambda folder: stio.load(folder / "ok.safetensors", progress=_fail),
    "load_into": lambda folder: stio.load_into(nn.Linear(2, 2), folder / "ok.safetensors"),
    "load_state": lambda folder: stio.load_state(folder / "no"),
    "save": lambda folder: stio.save(ONE, folder / "ok.safetensors" / "x"),
    "save with a callback": lambda folder: stio.save(ONE, folder / "saved", progress=_fail),
    "save_state": lambda folder: stio.save_state({"a": object()}, folder / "saved"),
    "convert nothing": lambda folder: stio.convert(folder / "no", folder / "out"),
    "convert a cut file": lambda folder: stio.convert(folder / "cut.pt", folder / "out"),
    "distributed.save": lambda folder: stio.distributed.save(ONE, folder / "ok.safetensors" / "x"),
    "distributed.load_into": lambda folder: stio.distributed.load_into(nn.Linear(2, 2), folder / "no"),
} | {
    case.__name__: case
    for case in (
        open_and_read, open_and_load_into, block_of_open, stream, stream_again, block_of_stream, pending_awaited,
        pending_result, pending_twice, saver_closed_with_failures, block_of_saver_with_failure, save_after_failure,
        block_of_saver, save_of_no_tensor, warm_start, warm_start_of_nothing, pool_use, pool_update, pool_prefetch,
        block_of_use, cache_prefetch, saver_of_ranks,
    )
}  # fmt: skip


@pytest.mark.parametrize("case", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
@pytest.mark.filterwarnings("ignore:stio.sync blocks")
async def test_c471_an_error_that_was_caught_is_kept_by_nothing(case: Case, folder: Path) -> None:
    kind, left = await catch(case, folder)
    assert kind and left == [], kind


def sync_stream(folder: Path) -> None:
    with sync.open(folder / "ok.safetensors") as checkpoint:
        list(checkpoint.stream("no"))


def sync_read(folder: Path) -> None:
    with sync.open(folder / "ok.safetensors") as checkpoint:
        checkpoint.read("no")


def sync_open(folder: Path) -> None:
    with sync.open(folder / "no"):
        pass


def sync_result(folder: Path) -> None:
    with sync.Saver() as saver:
        saver.save(ONE, folder / "ok.safetensors" / "x").result()


def sync_close(folder: Path) -> None:
    saver = sync.Saver()
    saver.save(ONE, folder / "ok.safetensors" / "x")
    saver.close()


def sync_use(folder: Path) -> None:
    with sync.ModelPool(device="cpu", device_bytes="1GB") as pool:
        pool.add("m", folder / "bad.safetensors")
        with pool.use("m"):
            pass


def block_of_sync_use(folder: Path) -> None:
    with sync.ModelPool(device="cpu", device_bytes="1GB") as pool:
        pool.add("m", folder / "ok.safetensors")
        with pool.use("m"):
            raise stio.StioError("of the caller")


def sync_warm_start(folder: Path) -> None:
    with sync.warm_start(_meta(), folder / "ok.safetensors") as load:
        load.done()


def opened_by_the_drop_in(folder: Path) -> None:
    with safe_open(folder / "ok.safetensors", "pt") as file:
        file.get_tensor("no")


def read_metadata(folder: Path) -> None:
    reader = StioStorageReader(folder / "no")
    reader.set_up_storage_reader(reader.read_metadata(), True)


def metadata_is_used(folder: Path) -> None:
    metadata = StioStorageReader(folder / "no").read_metadata()
    metadata.state_dict_metadata.keys()


def command(*args: str) -> Callable[[Path], object]:
    return lambda folder: main([args[0], str(folder / args[1]), *(str(folder / name) for name in args[2:])])


BLOCKING: dict[str, Callable[[Path], object]] = {
    "load": lambda folder: sync.load(folder / "no"),
    "load_into": lambda folder: sync.load_into(nn.Linear(2, 2), folder / "ok.safetensors"),
    "load_state": lambda folder: sync.load_state(folder / "no"),
    "save": lambda folder: sync.save(ONE, folder / "ok.safetensors" / "x"),
    "convert": lambda folder: sync.convert(folder / "no", folder / "out"),
    "latest": lambda folder: stio.latest(folder / "no"),
    "drop-in load": lambda folder: drop_in.load_file(folder / "bad.safetensors"),
    "drop-in save": lambda folder: drop_in.save_file(ONE, folder / "ok.safetensors" / "x"),
    "drop-in model": lambda folder: drop_in.load_model(nn.Linear(2, 2), folder / "ok.safetensors"),
    "stio verify": command("verify", "no"),
    "inspect": command("inspect", "no"),
    "stio convert": command("convert", "no", "out"),
    "stio load": command("load", "no"),
    "stio diff": command("diff", "no", "no"),
} | {
    case.__name__: case
    for case in (
        sync_stream, sync_read, sync_open, sync_result, sync_close, sync_use, block_of_sync_use, sync_warm_start,
        opened_by_the_drop_in, read_metadata, metadata_is_used,
    )
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKING.values(), ids=BLOCKING)
def test_c471_without_a_loop(case: Callable[[Path], object], folder: Path) -> None:
    refs: list[weakref.ref[Any]] = []

    def caller() -> str:
        local = Local()
        refs.append(weakref.ref(local))
        try:
            case(folder)
        except (Exception, SystemExit) as error:
            with suppress(TypeError):
                refs.append(weakref.ref(error))
            return type(error).__name__
        return ""

    with collector_off():
        assert caller() and [ref() for ref in refs] == [None] * len(refs)


def test_c471_a_save_that_is_kept_raises_again_and_keeps_no_caller(folder: Path) -> None:
    refs: list[weakref.ref[Any]] = []

    def ask() -> tuple[type, str, object]:
        local = Local()
        try:
            pending.result()
        except stio.StorageError as error:
            refs.extend((weakref.ref(local), weakref.ref(error)))
            return type(error), str(error), error.errno
        raise AssertionError

    with collector_off(), suppress(stio.StorageError), sync.Saver() as saver:
        pending = saver.save(ONE, folder / "ok.safetensors" / "x")
        first, second, third = ask(), ask(), ask()
        assert first == second == third
        assert [ref() for ref in refs] == [None] * 6


def test_c471_an_operation_that_failed_is_freed_without_the_collector() -> None:
    def body(operation: Operation[None]) -> None:
        del operation  # the frames of stio's own bodies are cleared
        raise OSError(5, "no", "file")

    with collector_off():
        operation = Operation(body, name="test")
        for _ in range(2):
            with pytest.raises(OSError) as caught:
                operation.result()
            assert caught.value.args == (5, "no") and caught.value.filename == "file"
            del caught
        alive = weakref.ref(operation)
        del operation
        assert eventually(lambda: alive() is None)  # its thread ends


class _OfTwoValues(Exception):
    def __init__(self, name: str, value: int) -> None:
        super().__init__(f"{name} is {value}")
        self.value = value


class _Prefixed(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"no: {text}")


@pytest.mark.parametrize(
    "error",
    [
        _OfTwoValues("a", 3),
        _Prefixed("a"),
        OSError(2, "text", "file"),
        KeyError("a"),
        UnicodeDecodeError("utf-8", b"a", 0, 1, "text"),
        ExceptionGroup("all", [ValueError("a")]),
        stio.StorageError("a", path="p", errno=5),
        stio.NoSpaceError("a", path="p", errno=28, needed_bytes=4, free_bytes=3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_c471_a_copy_of_an_error_is_like_it(error: Exception) -> None:
    error.__cause__ = ValueError("cause")
    error.add_note("note")
    made = copy_of(error)
    assert made is not error and type(made) is type(error)
    assert str(made) == str(error) and made.args == error.args and made.__cause__ is error.__cause__
    assert vars(made) == vars(error)


def test_c472_savers_in_turn_keep_no_staging_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[weakref.ref[StagingPool]] = []
    made = StagingPool.__init__

    def note(self: StagingPool, *args: Any) -> None:
        pools.append(weakref.ref(self))
        made(self, *args)

    monkeypatch.setattr(StagingPool, "__init__", note)
    with collector_off():
        for step in range(20):
            with sync.Saver() as saver:
                saver.save(ONE, tmp_path / ("w.safetensors" if step % 2 else f"{step % 3}"))
            with sync.Saver() as saver, suppress(stio.StorageError):
                saver.save(ONE, tmp_path / "0" / "model.safetensors" / "x").result()
            del saver
        assert eventually(lambda: not any(pool() is not None for pool in pools))


@contextmanager_of_stio
def _translated() -> Iterator[int]:
    try:
        yield 3
    except KeyError as error:
        raise stio.StioError("translated") from error
    except OSError:
        pass


@pytest.mark.parametrize("raised", [None, KeyError, OSError, ValueError, StopIteration])
def test_c472_contexts_are_like_those_of_contextlib(raised: type[Exception] | None) -> None:
    def run(decorate: Any) -> tuple[object, ...]:
        try:
            with decorate(_translated.__wrapped__)() as value:
                if raised is not None:
                    raise raised(5, "a")
        except Exception as error:
            return type(error), str(error), repr(error.__cause__), len(list(traceback.walk_tb(error.__traceback__)))
        return (value,)

    assert run(contextmanager_of_stio) == run(contextmanager)


@pytest.mark.parametrize("raised", [KeyError, OSError, ValueError, StopIteration])
def test_c472_a_context_keeps_no_frame(raised: type[Exception]) -> None:
    refs = []

    def caller() -> None:
        local = Local()
        refs.append(weakref.ref(local))
        with suppress(Exception), _translated():
            raise raised

    with collector_off():
        caller()
        assert refs[0]() is None


def test_c472_no_context_of_contextlib_is_left() -> None:
    package = Path(stio.__file__).parent  # `integrations/` has public names only, and handles no errors in contexts
    sources = [path for path in package.rglob("*.py") if path.parent.name != "integrations"]
    assert [path.name for path in sources if re.search(r"contextlib import.*\bcontextmanager", path.read_text())] == []
