"""Changed elements of tensors, found and written by the engine and by numpy, both compared with plain loops."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import deltas
import pytest
from counts import count
from deltas import find_changes, find_changes_in
from native.support import REPOSITORY, Memory, compiled, run_script

from stio import native
from stio.errors import FormatError
from stio.runtime.memory import Region
from stio.storage.checkpoint.changes import Changes, Comparison, apply_changes

WIDTHS = [1, 2, 4, 8, 16]
DELTA_C = str(REPOSITORY / "stio" / "native" / "delta.c")
WINDOW_BYTES = 128 << 10
"""Of the target that `stio_delta_apply` fills at a time."""


@pytest.fixture(params=["engine", "numpy"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr(native, "available", lambda: name == "engine")
    return name


# A plain model.


def codes_of(positions: Sequence[int], code_bytes: int) -> bytes:
    largest, codes, end = (1 << 8 * code_bytes) - 1, bytearray(), 0
    for position in positions:
        skips, last = divmod(position - end, largest)
        codes += b"\xff" * (skips * code_bytes) + last.to_bytes(code_bytes, "little")
        end = position + 1
    return bytes(codes)


def expected_codes(positions: Sequence[int], num_elements: int, item_bytes: int) -> tuple[int, bytes] | None:
    both = [(code_bytes, codes_of(positions, code_bytes)) for code_bytes in (1, 2)]
    code_bytes, codes = min(both, key=lambda one: len(one[1]))
    whole = num_elements * item_bytes
    return None if whole and len(codes) + len(positions) * item_bytes >= whole else (code_bytes, codes)


def memory_of(data: bytes, shift: int = 0) -> Memory:
    memory = Memory(len(data), shift)
    memory.fill(data)
    return memory


def changed(data: bytes, positions: Sequence[int], item_bytes: int, seed: int = 1) -> bytes:
    """Change one byte of each of these elements."""
    bytes_of = random.Random(seed)
    new = bytearray(data)
    for position in positions:
        new[position * item_bytes + bytes_of.randrange(item_bytes)] ^= bytes_of.randrange(1, 256)
    return bytes(new)


def values_at(data: bytes, positions: Sequence[int], item_bytes: int) -> bytes:
    return b"".join(data[k * item_bytes : (k + 1) * item_bytes] for k in positions)


def changes_at(positions: Sequence[int], values: bytes, item_bytes: int, code_bytes: int) -> Changes:
    return made_of(codes_of(positions, code_bytes), code_bytes, values, len(positions), item_bytes)


def made_of(codes: bytes, code_bytes: int, values: bytes, number: int, item_bytes: int) -> Changes:
    one, other = memory_of(codes, 1), memory_of(values, 3)
    return Changes(
        Region(one.address, len(codes), one), code_bytes, Region(other.address, len(values), other), number, item_bytes
    )


def require_found(old: bytes, positions: Sequence[int], item_bytes: int, shift: int = 0, seed: int = 1) -> None:
    """Compare, check codes and values with the model, and apply them to the old bytes."""
    new = changed(old, positions, item_bytes, seed)
    image, fresh = memory_of(old, shift), memory_of(new, 2 * shift)
    num_elements = len(old) // item_bytes
    found = find_changes(image.address, fresh.address, num_elements, item_bytes)
    assert image[:] == new == fresh[:]
    image.require_guards()
    expected = expected_codes(positions, num_elements, item_bytes)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.code_bytes, found.codes.tobytes()) == expected
    assert (found.count, found.item_bytes) == (len(positions), item_bytes)
    assert found.values.tobytes() == values_at(new, positions, item_bytes)
    image.fill(old)
    apply_changes([found], num_elements, [(0, num_elements, image.address)])
    assert image[:] == new
    image.require_guards()


# Comparing.

GAPS = [0, 1, 253, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 131069, 131070, 131071]


@pytest.mark.parametrize("item_bytes", WIDTHS)
def test_gaps_around_the_largest_codes(item_bytes: int) -> None:
    for gap in GAPS[: None if item_bytes == 1 else 12]:
        num_elements = gap + 130_000 // item_bytes
        old = random.Random(gap).randbytes(num_elements * item_bytes)
        require_found(old, [gap], item_bytes)
        require_found(old, [3, 4 + gap], item_bytes)


@pytest.mark.parametrize("code_bytes", [1, 2])
def test_many_gaps_with_the_shorter_codes(code_bytes: int) -> None:
    gaps = GAPS[:4] * 1000 + GAPS if code_bytes == 1 else GAPS * 2
    positions = [sum(gaps[: k + 1]) + k for k in range(len(gaps))]
    number = positions[-1] + 1
    assert (expected_codes(positions, number, 1) or (0,))[0] == code_bytes
    require_found(random.Random(1).randbytes(number), positions, 1)


@pytest.mark.parametrize("item_bytes", WIDTHS)
def test_small_tensors(item_bytes: int) -> None:
    for num_elements in (0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 1000):
        old = random.Random(num_elements).randbytes(num_elements * item_bytes)
        require_found(old, [], item_bytes)
        require_found(old, range(num_elements), item_bytes)
        if num_elements > 1:
            require_found(old, [0], item_bytes)
            require_found(old, [num_elements - 1], item_bytes)
            require_found(old, [num_elements // 2], item_bytes)


@pytest.mark.parametrize("item_bytes", WIDTHS)
def test_each_byte_of_each_element_counts(item_bytes: int) -> None:
    """In each place of two lines, and behind them."""
    num_elements = 150 // item_bytes
    for at in range(num_elements * item_bytes):
        old, new = bytes(num_elements * item_bytes), bytearray(num_elements * item_bytes)
        new[at] = 0x80
        image, fresh = memory_of(old), memory_of(bytes(new))
        found = find_changes(image.address, fresh.address, num_elements, item_bytes)
        assert image[:] == new
        assert found is not None
        assert found.codes.tobytes() == bytes([at // item_bytes])


@pytest.mark.parametrize("shift", [1, 3, 8])
@pytest.mark.parametrize("item_bytes", WIDTHS)
def test_addresses_need_not_be_aligned(item_bytes: int, shift: int) -> None:
    positions = sorted(random.Random(1).sample(range(5000), 100))
    require_found(random.Random(2).randbytes(5000 * item_bytes), positions, item_bytes, shift)


@pytest.mark.parametrize(
    ("positions", "num_elements", "is_found"),
    [
        (range(0, 100, 2), 100, False),
        (range(0, 100, 2), 101, True),
        ([*range(299), 555], 601, False),  # 300 elements, 301 codes
        ([*range(299), 555], 602, True),
    ],
)
def test_a_tensor_is_whole_if_it_is_not_longer(positions: Sequence[int], num_elements: int, is_found: bool) -> None:
    old = random.Random(1).randbytes(num_elements)
    new = changed(old, positions, 1)
    image, fresh = memory_of(old), memory_of(new)
    assert (find_changes(image.address, fresh.address, num_elements, 1) is not None) == is_found
    assert image[:] == new


@pytest.mark.parametrize("item_bytes", [1, 2, 16])
def test_the_image_is_up_to_date_behind_the_place_where_collecting_ends(item_bytes: int) -> None:
    old = random.Random(1).randbytes(100_000 * item_bytes)
    new = bytes(byte ^ 1 for byte in old)
    image, fresh = memory_of(old), memory_of(new)
    assert find_changes(image.address, fresh.address, 100_000, item_bytes) is None
    assert image[:] == new


def test_a_comparison_takes_no_memory_for_what_is_equal(implementation: str) -> None:
    if implementation == "numpy":
        pytest.skip("numpy is allowed more")
    script = """
import sys
from stio.runtime.memory import allocate
from stio.storage.checkpoint.changes import Comparison
def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
nbytes = 32 << 20
image, fresh = allocate(nbytes), allocate(nbytes)
image.write(0, bytes(nbytes))
fresh.write(0, (b"\\1" + bytes(1999)) * (nbytes // 2000) + bytes(nbytes % 2000))
before = held()
comparison = Comparison(nbytes // 2, 2, 1)
comparison.compare(0, image.address, fresh.address, nbytes // 2)
print(held() - before, comparison.changes().count, "numpy" in sys.modules)
"""
    done = run_script(script)
    grown, number, has_numpy = done.stdout.split()
    assert int(grown) < 1 << 20, done.stderr
    assert (int(number), has_numpy) == ((32 << 20) // 2000, "False")


# Pieces.


def compare_pieces(cuts: Sequence[int], old: bytes, new: bytes, item_bytes: int) -> Changes | None:
    """Compare between these cuts, the pieces in any order, each in memory of its own."""
    ends = [*cuts, len(old) // item_bytes]
    spans = [(start * item_bytes, end * item_bytes) for start, end in zip([0, *cuts], ends, strict=True)]
    comparison = Comparison(len(old) // item_bytes, item_bytes, len(spans))
    for k in random.Random(1).sample(range(len(spans)), len(spans)):
        start, end = spans[k]
        image, fresh = memory_of(old[start:end], k % 5), memory_of(new[start:end])
        comparison.compare(k, image.address, fresh.address, (end - start) // item_bytes)
        assert image[:] == new[start:end]
        image.require_guards()
    return comparison.changes()


@pytest.mark.parametrize("gap", [100, 254, 255, 256, 600, 65534, 65535, 65536, 70_000])
def test_pieces_are_one_tensor(gap: int) -> None:
    """The cuts are in gaps, at changes, beside each other, and at the ends."""
    positions = [*range(40), *(40 + (gap + 1) * k for k in range(1, 4))]
    number = positions[-1] + 200
    old = random.Random(gap).randbytes(number * 2)
    new = changed(old, positions, 2)
    expected = expected_codes(positions, number, 2)
    assert expected is not None
    first, second = positions[41], positions[42]
    for cuts in (
        [0, first, first + 1, number],
        [10, 10, first - 1, first + 2, first + gap // 2, second],
        [first + 1, first + 2, second - 50, second + 1, number - 1],
        [*range(1, number, number // 50)],
    ):
        found = compare_pieces(cuts, old, new, 2)
        assert found is not None
        assert (found.code_bytes, found.codes.tobytes()) == expected
        assert found.values.tobytes() == values_at(new, positions, 2)


def test_a_tensor_is_whole_by_all_of_its_pieces() -> None:
    """One piece may be changed as a whole where the others are equal."""
    old = random.Random(1).randbytes(60_000)
    new = changed(old, range(20_000), 1)
    assert compare_pieces([20_000], old, new, 1) is not None
    new = changed(old, range(30_000), 1)
    assert compare_pieces([20_000, 40_000], old, new, 1) is None


def test_a_piece_that_is_missing_is_an_error() -> None:
    memory, other = memory_of(bytes(100)), memory_of(bytes(100))
    comparison = Comparison(100, 1, 2)
    comparison.compare(1, memory.address, other.address, 60)
    with pytest.raises(ValueError, match="not the whole tensor"):
        comparison.changes()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_threads_share_a_tensor(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "_PIECE_BYTES", 5000)
    positions = sorted(random.Random(1).sample(range(100_000), 2000))
    old = random.Random(2).randbytes(200_000)
    new = changed(old, positions, 2)
    image, fresh = memory_of(old), memory_of(new)
    pieces = [
        (image.address + 2 * start, fresh.address + 2 * start, end - start)
        for start, end in ((0, 30_001), (30_001, 30_001), (30_001, 100_000))
    ]
    found = find_changes_in(pieces, 2, num_threads=num_threads)
    assert image[:] == new
    assert found is not None
    assert (found.code_bytes, found.codes.tobytes()) == expected_codes(positions, 100_000, 2)
    assert found.values.tobytes() == values_at(new, positions, 2)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_nothing_to_compare(num_threads: int) -> None:
    for pieces in ([], [(0, 0, 0)]):
        found = find_changes_in(pieces, 4, num_threads=num_threads)
        assert found is not None
        assert (found.count, found.nbytes) == (0, 0)


# Applying.


@pytest.mark.parametrize("code_bytes", [1, 2])
@pytest.mark.parametrize("item_bytes", WIDTHS)
def test_a_chain_is_applied_in_its_order(item_bytes: int, code_bytes: int) -> None:
    """Several windows, and changes of the same elements."""
    number = 2 * WINDOW_BYTES // item_bytes + 77
    rng, old = random.Random(item_bytes), random.Random(1).randbytes(number * item_bytes)
    new, changes = old, []
    edges = [0, WINDOW_BYTES // item_bytes - 1, WINDOW_BYTES // item_bytes, number - 1]
    for seed in range(5):
        positions = sorted({*rng.sample(range(number), 400), *edges})
        new = changed(new, positions, item_bytes, seed)
        changes.append(changes_at(positions, values_at(new, positions, item_bytes), item_bytes, code_bytes))
    target = memory_of(old, 5)
    apply_changes(changes, number, [(0, number, target.address)])
    assert target[:] == new
    target.require_guards()


@pytest.mark.parametrize("code_bytes", [1, 2])
@pytest.mark.parametrize("item_bytes", [1, 2, 16])
def test_pieces_get_their_part(item_bytes: int, code_bytes: int) -> None:
    """Pieces far behind others pass over blocks of codes, some of which end within a gap."""
    rng, largest = random.Random(item_bytes), (1 << 8 * code_bytes) - 1
    gaps = [rng.choice([0, 1, 5, 40]) if rng.random() < 0.97 else 3 * largest for _ in range(3000)]
    gaps[250:260] = [40 * largest] * 10
    positions = [sum(gaps[: k + 1]) + k for k in range(len(gaps))]
    number = positions[-1] + 10
    first_values, values = rng.randbytes(len(positions) * item_bytes), rng.randbytes(len(positions) * item_bytes)
    changes = [changes_at(positions, one, item_bytes, code_bytes) for one in (first_values, values)]
    for _ in range(20):
        starts = sorted({max(0, rng.choice(positions) - rng.choice([0, 1, 300])) for _ in range(4)})
        lengths = [min(rng.choice([1, 50, 5000]), end - start) for start, end in pairwise([*starts, number])]
        spans = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        targets = [memory_of(bytes((end - start) * item_bytes), 3) for start, end in spans]
        pieces = [(start, end - start, one.address) for (start, end), one in zip(spans, targets, strict=True)]
        apply_changes(changes, number, pieces)
        for (start, end), target in zip(spans, targets, strict=True):
            expected = bytearray((end - start) * item_bytes)
            for k, position in enumerate(positions):
                if start <= position < end:
                    at = (position - start) * item_bytes
                    expected[at : at + item_bytes] = values[k * item_bytes : (k + 1) * item_bytes]
            assert target[:] == expected
            target.require_guards()


def test_no_changes_and_no_pieces() -> None:
    target = memory_of(b"abcd")
    apply_changes([], 4, [(0, 4, target.address)])
    apply_changes([changes_at([], b"", 1, 1)], 4, [(0, 4, target.address)])
    apply_changes([changes_at([1], b"x", 1, 1)], 4, [])
    apply_changes([changes_at([1], b"x", 1, 1)], 4, [(0, 0, target.address), (3, 1, target.address + 3)])
    assert target[:] == b"abcd"


# Codes, their number of elements, and whether they are of a tensor of 1000 elements.
HOSTILE: dict[str, tuple[list[int], int, int, bool]] = {
    "the last element": ([255, 255, 255, 234], 1, 1, True),
    "past the end by one": ([255, 255, 255, 235], 1, 1, False),
    "past the end by a second one": ([255, 255, 255, 234, 0], 2, 1, False),
    "far past the end": ([254] * 100, 100, 1, False),
    "many, past the end": ([1] * 600, 600, 1, False),
    "fewer than said": ([1, 2, 3], 4, 1, False),
    "more than said": ([1, 2, 3], 2, 1, False),
    "none, and one is said": ([], 1, 1, False),
    "the last code goes on": ([1, 255], 1, 1, False),
    "nothing but going on": ([255, 255], 0, 1, False),
    "two bytes, the last element": ([999], 1, 2, True),
    "two bytes, past the end": ([1000], 1, 2, False),
    "two bytes, going on": ([65535, 0], 1, 2, False),
    "two bytes, the last code goes on": ([1, 65535], 1, 2, False),
    "two bytes, a code of which one byte is the largest": ([255], 1, 2, True),
    "two bytes, more than said": ([1, 1], 1, 2, False),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("number_of_good", [0, 1])
def test_malformed_codes_are_refused_before_the_first_write(name: str, number_of_good: int) -> None:
    codes, number, code_bytes, is_valid = HOSTILE[name]
    hostile = made_of(
        b"".join(code.to_bytes(code_bytes, "little") for code in codes), code_bytes, b"x" * number, number, 1
    )
    changes = [changes_at([0, 500], b"yy", 1, 1)] * number_of_good + [hostile]
    target = memory_of(bytes(1000))
    if is_valid:
        apply_changes(changes, 1000, [(0, 1000, target.address)])
        assert target[:].count(b"x") == number
        return
    with pytest.raises(FormatError, match="past the end of its tensor"):
        apply_changes(changes, 1000, [(0, 1000, target.address)])
    assert target[:] == bytes(1000)


def test_codes_of_an_empty_tensor_are_refused() -> None:
    with pytest.raises(FormatError):
        apply_changes([changes_at([0], b"x", 1, 1)], 0, [])


def test_values_that_are_not_as_many_are_refused() -> None:
    target = memory_of(bytes(8))
    for found in (changes_at([0, 1], b"x", 1, 1), replace(changes_at([0], b"xx", 1, 1), item_bytes=4)):
        with pytest.raises(FormatError):
            apply_changes([found], 2, [(0, 2, target.address)])
    assert target[:] == bytes(8)


def test_pieces_ascend() -> None:
    target = memory_of(bytes(10))
    for pieces in ([(5, 5, target.address), (0, 5, target.address)], [(0, 5, target.address), (4, 5, target.address)]):
        with pytest.raises(ValueError, match="ascend"):
            apply_changes([changes_at([1], b"x", 1, 1)], 10, pieces)


# Both, and at random.


@pytest.mark.parametrize("rounds", [30, pytest.param(count(300, 3000), marks=pytest.mark.slow)])
def test_random_changes(rounds: int) -> None:
    for seed in range(rounds):
        rng = random.Random(seed)
        item_bytes = rng.choice(WIDTHS)
        number = rng.randrange(rng.choice([10, 300, 20_000]))
        fraction = rng.choice([0.001, 0.01, 0.1, 0.5, 1])
        positions = [k for k in range(number) if rng.random() < fraction]
        require_found(rng.randbytes(number * item_bytes), positions, item_bytes, rng.randrange(9), seed)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-U__SSE2__",)], ids=["usual", "without SSE2"])
def test_the_fuzz_finds_nothing(flags: tuple[str, ...], tmp_path: Path, implementation: str) -> None:
    if implementation == "numpy":
        pytest.skip("it is for the engine")
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    fuzz = compiled(tmp_path / "delta", "delta.c", *sanitizers, *flags, DELTA_C)
    command = [fuzz, str(count(1, 5)), str(int(time.time()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_switch_chooses(switch: str) -> None:
    script = """
import ctypes, sys
from stio.storage.checkpoint.changes import Comparison, apply_changes
assert "numpy" not in sys.modules
old, new = (ctypes.create_string_buffer(text, 8) for text in (b"abcdefgh", b"abCdefgh"))
comparison = Comparison(8, 1, 1)
comparison.compare(0, ctypes.addressof(old), ctypes.addressof(new), 8)
found = comparison.changes()
target = ctypes.create_string_buffer(b"abcdefgh", 8)
apply_changes([found], 8, [(0, 8, ctypes.addressof(target))])
print(old.raw, target.raw, "numpy" in sys.modules)
"""
    done = run_script(script, STIO_NATIVE=switch)
    assert done.stdout.split() == [str(b"abCdefgh")] * 2 + [str(switch == "0")], done.stderr
