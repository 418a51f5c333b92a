"""The logger `stio`: lines at DEBUG for each operation, silence otherwise, and no handler of its own."""

from __future__ import annotations

import logging
import re

import pytest
from support import oracle, ramp, require_equal, save_sharded

import stio
from stio import sync
from stio.runtime.operation import Operation

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_sharded({f"layer.{k}": ramp(64, 64) for k in range(6)}, tmp_path_factory.mktemp("model"), 2)


DATA_BYTES = f"{6 * 64 * 64 * 4:,}"


@pytest.fixture
def lines(caplog):
    """Return a function that gives the lines so far, and forgets them."""
    caplog.set_level(logging.DEBUG, logger="stio")

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "stio"]
        caplog.clear()
        return found

    return take


async def test_a_load_logs_source_size_read_path_and_time(directory, lines):
    await stio.load(directory, memory="copy")
    begin, end = lines()
    assert begin == f"load {directory}: begins"
    assert re.fullmatch(
        rf"load {re.escape(str(directory))}: done after \d+\.\d{{3}} s; {DATA_BYTES} bytes of 6 tensors by CopiedPath, "
        "(engine|plain)",
        end,
    )


def test_each_operation_has_two_lines(directory, tmp_path, lines):
    with sync.open(directory) as checkpoint:
        assert [line.split(":")[0] for line in lines()] == [f"open {directory}"] * 2
        list(checkpoint.stream())
        assert [line.split(":")[0] for line in lines()] == [f"stream {directory}"] * 2
    sync.save({"a": ramp(9)}, tmp_path / "out")
    begin, end = lines()
    assert begin == f"save {tmp_path / 'out'}: begins"
    assert re.search(r"done after [0-9.]+ s; [0-9,]+ bytes in 1 files$", end)


def test_failures_and_cancels(directory, tmp_path, lines):
    with pytest.raises(stio.CheckpointNotFoundError):
        sync.load(tmp_path / "nothing")
    assert re.search(r": failed by CheckpointNotFoundError after [0-9.]+ s$", lines()[1])
    with sync.open(directory, memory="copy", budget_bytes=32 << 10) as checkpoint:
        lines()
        with checkpoint.stream() as stream:
            next(stream)
    assert re.search(r": cancelled after [0-9.]+ s$", lines()[-1])


@pytest.mark.slow
def test_the_number_of_lines_does_not_grow_with_the_load(directory, tmp_path, lines):
    sync.save({f"t{k}": ramp(100) for k in range(3000)}, tmp_path / "many", max_shard_size="100kB")
    lines()
    sync.load(tmp_path / "many", memory="copy", budget_bytes=64 << 10)
    assert len(lines()) == 2


def test_hostile_paths_are_escaped(tmp_path, lines):
    with pytest.raises(stio.StioError):
        sync.load(tmp_path / "a\nERROR forged \x1b[31m")
    assert all("\n" not in line and "\x1b" not in line for line in lines())


def test_nothing_is_said_above_debug(directory, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="stio")
    sync.save(sync.load(directory), tmp_path / "out")
    assert caplog.records == []


class Raising(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.calls = 0

    def handle(self, record: logging.LogRecord) -> bool:
        self.calls += 1
        raise RuntimeError("a handler that is broken")


def test_a_handler_that_raises_has_no_effect(directory, caplog):
    caplog.set_level(logging.DEBUG, logger="stio")
    handler = Raising()
    logging.getLogger("stio").addHandler(handler)
    try:
        require_equal(sync.load(directory), oracle(directory))
        with pytest.raises(stio.TensorNotFoundError):
            sync.load(directory, names="nobody")
    finally:
        logging.getLogger("stio").removeHandler(handler)
    assert handler.calls == 4


def test_log_details_are_not_made_without_debug_logging(caplog):
    asked = []

    def body(operation):
        operation.set_log_detail(lambda: asked.append(1) or "text")

    caplog.set_level(logging.INFO, logger="stio")
    Operation(body, name="test").start().result()
    assert asked == []
    caplog.set_level(logging.DEBUG, logger="stio")
    Operation(body, name="test").start().result()
    assert asked == [1]


def test_a_library_configures_nothing(zygote, directory):
    """No handler, no level, and it propagates; so Python's default shows warnings, and nothing below them."""
    found = zygote.run(
        """
        import logging, sys
        import stio, stio.sync, stio.compat.huggingface_hub, stio.compat.safetensors.torch, stio.conversion.api, stio.testing
        stio.sync.load(sys.argv[1])
        logger = logging.getLogger("stio")
        assert [type(handler) for handler in logger.handlers if type(handler) is not logging.NullHandler] == []
        assert (logger.level, logger.propagate, logger.disabled) == (logging.NOTSET, True, False)
        root = logging.getLogger()
        assert (root.handlers, root.level) == ([], logging.WARNING)
        logger.info("not shown")
        logger.error("shown")  # as for a failed save that is never awaited
        """,
        directory,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "shown\n")
