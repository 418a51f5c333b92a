"""Fixtures and settings of all tests."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stio import native

sys.path.insert(0, str(Path(__file__).parent))

gc.disable()  # until the tests are collected: nothing of that is garbage, and the collector would look through it again and again

# Threads of OpenMP spin while they wait. Several processes with as many as there are processors take three times the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

locks = importlib.import_module("stio.process")
loops = importlib.import_module("loops")
calls = importlib.import_module("stio.storage.commit.syscalls")
clock = importlib.import_module("clocks").clock
"""A fixture: the time of a test, see `clocks.Clock`."""
logged_under_a_lock: list[str] = []


def _note_locks(record: logging.LogRecord) -> bool:
    """Note what is logged under a lock: log handlers are user code. (An error would be ignored, as those of handlers.)"""
    if locks._held.count:
        logged_under_a_lock.append(record.getMessage())
    return True


logging.getLogger("stio").addFilter(_note_locks)


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get("STIO_TEST_COSTS"):
        config.pluginmanager.register(importlib.import_module("costs").Recorder(Path(folder)))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    importlib.import_module("counts").mark_slow(items)
    gc.enable()


@pytest.fixture(autouse=True)
def _logs_under_no_lock() -> Iterator[None]:
    yield
    found = logged_under_a_lock.copy()
    logged_under_a_lock.clear()
    assert found == []


with suppress(ImportError):  # a machine with a GPU and no network may lack it
    timeouts: Any = importlib.import_module("pytest_timeout")
    dump_stacks = timeouts.dump_stacks

    def _dump_stacks_and_name(terminal: Any) -> None:
        """Name the test that did not end at the end of the output too: of a long output, often only the end is kept."""
        dump_stacks(terminal)
        terminal.line(f"did not end: {os.environ.get('PYTEST_CURRENT_TEST')}")

    timeouts.dump_stacks = _dump_stacks_and_name


if os.environ.get("STIO_TEST_DEVICE") == "sim":
    # Before any test is collected: the tests look whether torch has an accelerator.
    simdevice = importlib.import_module("simdevice")
    with suppress(simdevice.Unavailable):  # what needs it is skipped then, with the reason
        simdevice.install(float(os.environ.get("STIO_TEST_DEVICE_DELAY", "0")))
        simdevice.set_released(0)  # few tests have a busy thread

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts in the background so, and every process of a test's would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_is_unpinned_early() -> Iterator[None]:
    """Memory is unpinned behind the copies that read it or write to it, whatever ends a test."""

    def count() -> int:
        simdevice = sys.modules.get("simdevice")
        return simdevice.num_unpinned_early() if simdevice is not None and simdevice.installed() else 0

    before = count()
    yield
    assert count() == before


@pytest.fixture(params=loops.BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Run tests that are marked `anyio` on the loops of `make test`, and others as slow tests."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _settle_torch() -> None:
    """Keep torch from starting threads, which tests that count threads would see, and out of every collection."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    pytest.importorskip("hypothesis")  # its plugin looks through the collector's objects when it is imported


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the parent of processes that begin with torch and stio imported."""
    modules = ["torch", "stio.sync", "stio.cli.main", "support"]
    zygote = pytest.importorskip("crash.zygote").Zygote(tmp_path_factory.mktemp("output"), modules)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def torch_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the parent of processes that begin with torch imported, and nothing of stio."""
    zygote = pytest.importorskip("crash.zygote").Zygote(tmp_path_factory.mktemp("output"), ["torch"])
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def trainer_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the parent of processes that begin with what trainings need imported."""
    modules = ["torch", "torch._dynamo", "stio.distributed", "stio.sync", "support"]
    modules += ["transformers.trainer"] if find_spec("transformers") and find_spec("accelerate") else []
    modules += ["lightning.pytorch"] if find_spec("lightning") else []
    zygote = pytest.importorskip("crash.zygote").Zygote(tmp_path_factory.mktemp("output"), modules)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def program_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the parent of processes that begin with the program `stio` imported, and so without torch."""
    zygote = pytest.importorskip("crash.zygote").Zygote(tmp_path_factory.mktemp("output"), ["stio.cli.main"])
    yield zygote
    zygote.close()


@pytest.fixture(scope="module", autouse=True)
def _ranks(request: pytest.FixtureRequest) -> None:
    """Start the processes that are ranks before the first test that needs them, which is not slower for it."""
    if "run_ranks" in vars(request.module):
        importlib.import_module("distributed.ranks").RankSet.shared()


@pytest.fixture
def fast_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Give an empty directory, in memory where there is one: saves that no power cut threatens wait for no disk.

    With `--basetemp` it is below that: `make nightly` has its tests on a disk, and stores the directory of one that fails.
    """
    if request.config.getoption("basetemp") is not None:
        yield request.getfixturevalue("tmp_path")
        return
    parent = importlib.import_module("crash.generations").fast_directory()
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """Give an empty directory where the system has its temporary files: `tests/run.py` has `tmp_path` in memory."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    """Keep what the session has piled up out of the collections that tests ask for: 1 ms each instead of 100 to 500.

    And let the 40 loggers of torch propagate: pytest attaches its handlers to each that does not, six times for each test.
    """
    gc.collect()
    gc.freeze()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="module", autouse=True)
def _not_nice() -> Iterator[None]:
    """Require that no test lowers the priority of the thread of all that follow, and of the processes they start."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.fixture
def plain_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the priority of the test's own thread, on which such a test runs a worker."""
    for name in ("process", "runtime.workers"):
        monkeypatch.setattr(importlib.import_module(f"stio.{name}"), "be_nice", lambda: None)


@pytest.fixture
def plain_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads use the plain executor, as where there is no engine."""
    monkeypatch.setattr(native, "available", lambda: False)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves do not become durable before the event is set."""
    plain, release = calls.fsync, threading.Event()

    def fsync(fd: int) -> None:
        assert release.wait(30)
        plain(fd)

    monkeypatch.setattr(calls, "fsync", fsync)
    yield release
    release.set()
