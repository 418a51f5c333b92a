"""Headers that are long or hostile: bounded in time and memory, and other threads get their turns (cases 72, 73)."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable

import pytest
from counts import count

from stio.errors import FormatError, LimitError
from stio.format.header import PREFIX_BYTES, Header, header_nbytes, parse_header
from stio.limits import Limits

GOOD = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def good(old: str, new: str) -> bytes:
    assert old in GOOD
    return GOOD.replace(old, new).encode()


def file_of(raw: bytes, data_bytes: int) -> bytes:
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


def parse(file: bytes, limits: Limits | None = None) -> Header:
    limits = limits or Limits()
    nbytes = header_nbytes(file[:PREFIX_BYTES], file_bytes=len(file), limits=limits, path="f.safetensors")
    raw = file[PREFIX_BYTES : PREFIX_BYTES + nbytes]
    return parse_header(raw, file_bytes=len(file), path="f.safetensors", shard="f.safetensors", limits=limits)


def many(count: int, *, size: int = 4, prefix: str = "model.layers.mlp.experts.gate_proj.weight") -> bytes:
    parts = [
        f'"{prefix}.{k:07d}":{{"dtype":"F32","shape":[{size // 4}],"data_offsets":[{k * size},{(k + 1) * size}]}}'
        for k in range(count)
    ]
    return ('{"__metadata__":{"format":"pt"},' + ",".join(parts) + "}").encode()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a72_a_million_zero_size_tensors_and_one() -> None:
    raw = many(1_000_001, size=0, prefix="t")
    start = time.perf_counter()
    with pytest.raises(LimitError, match="max_tensors"):
        parse(file_of(raw, 0))
    assert time.perf_counter() - start < 20
    with pytest.raises(LimitError):
        parse(file_of(many(11), 44), Limits(max_tensors=10))
    assert len(parse(file_of(many(10), 40), Limits(max_tensors=10))) == 10


def _longest_gap(action: Callable[[], object], enough: float = 0.0) -> float:
    """Return how long, at most, another thread had to wait for its turn, in seconds of this thread's processor time.

    So other processes of a busy machine, which take the cores away from both, count little. Not seen are work on further
    threads, and a wait that keeps the GIL: a parser has neither. It is the best of five runs; there are no more once
    one is below `enough`.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident())
    gaps: list[float] = []
    while len(gaps) < 5 and min(gaps, default=1.0) >= enough:
        worst, stop = [0.0], threading.Event()

        def tick(worst: list[float] = worst, stop: threading.Event = stop) -> None:
            last = time.clock_gettime(clock)
            while not stop.is_set():
                time.sleep(0.0005)
                now = time.clock_gettime(clock)
                worst[0], last = max(worst[0], now - last), now

        thread = threading.Thread(target=tick)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(0.0005)
        try:
            thread.start()
            kept = action()  # freed after the measurement: freeing lists of a million rows is one call as well
            stop.set()
            thread.join()
        finally:
            sys.setswitchinterval(interval)
            stop.set()
        del kept
        gaps.append(worst[0])
    return min(gaps)


# The longest wait is 2-4 ms. The bound is far above it, because on a busy machine the thread that waits may not get a
# core when its turn has come, and far below the 60 ms of one decode of the whole text.
LONGEST_GAP = 0.025
NUM_VALUES = count(300_000, 2_000_000)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_parsing_100_000_tensors_lets_other_threads_run() -> None:
    file = file_of(many(100_000), 400_000)
    assert _longest_gap(lambda: parse(file), LONGEST_GAP) < LONGEST_GAP


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sorting_100_000_tensors_lets_other_threads_run() -> None:
    entries = json.loads(many(100_000))
    entries.pop("__metadata__")
    names = sorted(entries, key=hash)
    raw = json.dumps({name: entries[name] for name in names}).encode()
    file = file_of(raw, 400_000)
    assert parse(file).names == sorted(names)
    assert _longest_gap(lambda: parse(file), LONGEST_GAP) < LONGEST_GAP


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b" " * 45_000_000 + GOOD.encode() + b" " * 45_000_000, id="spaces-around"),
        pytest.param(good(":", ":" + " " * 15_000_000), id="spaces-inside"),
        pytest.param(good('{"a"', '{"__metadata__":{"k":"' + "v" * 90_000_000 + '"},"a"'), id="one-metadata-value"),
        pytest.param(
            b'{"__metadata__":{'
            + b",".join(b'"%d":"%d"' % (k, k) for k in range(NUM_VALUES))
            + b"},"
            + GOOD.encode()[1:],
            id="many-metadata-values",
        ),
    ],
)
def test_a73_long_headers(raw: bytes) -> None:
    file_bytes = 8 + len(raw) + 8

    longest_seconds = 0.0

    def action() -> Header:
        nonlocal longest_seconds
        start = time.perf_counter()
        header = parse_header(raw, file_bytes=file_bytes, path="f", shard="f")
        longest_seconds = max(longest_seconds, time.perf_counter() - start)
        assert header.names == ["a"]
        return header

    # A dict is resized in one call, with two million keys in 40 ms. A value of 90 MB is read twice in one call: searched
    # for its end, and copied. More where memory is slow to come. That is measured beside it; nothing else may take as
    # long.
    bound = 0.05
    if b'"1":' in raw:
        bound += _longest_gap(_fill_a_dict)
    elif b"vvv" in raw:
        bound += 2 * _longest_gap(lambda: raw.decode())
    assert _longest_gap(action, bound) < bound
    assert longest_seconds < 20


def _fill_a_dict() -> dict[str, str]:
    filled = {}
    for number in range(NUM_VALUES):
        filled[str(number)] = ""
    return filled


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind", ["deep", "escapes", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("array", "rank"))]
)
def test_hostile_text_is_bounded(kind: str) -> None:
    raw = {
        "array": good("[2]", "[" + "1," * 5_000_000 + "1]"),
        "deep": good("[0,8]", '[0,8],"x":' + "[" * 10_000_000),
        "rank": good("[2]", "[" + "9" * 4000 + ",9" * 5_000_000 + "]"),
        "escapes": good('"a"', '"' + "\\\\" * 2_500_000 + "\\ud83d\\ude00" * 400_000 + '"'),
    }[kind]
    file = file_of(raw, 8)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        if kind == "escapes":
            assert parse(file).names == ["\\" * 2_500_000 + "😀" * 400_000]
        else:
            with pytest.raises(FormatError):
                parse(file)
        assert time.perf_counter() - start < 20
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
