"""The description of a delta, and how its files hold the changed elements: malformed, hostile, and at random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from counts import count

from stio.errors import FormatError, LimitError, StioError
from stio.format import build_header, header_nbytes, parse_header
from stio.format.delta import (
    DELTA_KEY,
    DELTA_TENSOR,
    MAX_LINKS,
    ChangedTensor,
    Delta,
    names_of,
    parse_delta,
    patches_of,
)
from stio.format.header import PREFIX_BYTES, Header

ID = "0123456789abcdef" * 2
GOOD: dict[str, Any] = {
    DELTA_KEY: 1,
    "base": "step-5",
    "base_id": ID,
    "depth": 1,
    "directory": True,
    "changed": [["w", "BF16", [3, 4], 2], ["packed", "F4", [8], 4], ["one", "F64", [], 1]],
}
POSITIONS, VALUES = names_of(0)


def parse(**other: Any) -> Delta:
    return parse_delta(json.dumps(GOOD | other).encode(), path="delta")


def header_of(*tensors: tuple[str, str, tuple[int, ...]]) -> Header:
    text, _ = build_header(tensors, None)
    nbytes = header_nbytes(text[:8], file_bytes=1 << 40, path="delta")
    return parse_header(
        text[8 : PREFIX_BYTES + nbytes], file_bytes=1 << 40, path="delta", shard="one", allow_trailing=True
    )


def test_a_description_is_the_same_after_its_text() -> None:
    delta = parse()
    assert parse_delta(delta.encode(), path="delta") == delta
    assert json.loads(delta.encode()) == GOOD
    assert [(one.item_bytes, one.num_elements) for one in delta.changed] == [(2, 12), (1, 4), (8, 1)]
    assert parse(depth=MAX_LINKS, base="run/step-5", base_id="sha256:" + 2 * ID, changed=[]).base == "run/step-5"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"stio.delta":1}',
        b"[" * 100_000,
        b'{"stio.delta":1,"other":' + b"[" * 100_000,
        json.dumps(GOOD).encode()[:-1],
        json.dumps(GOOD).encode() + b"x",
        json.dumps(GOOD | {"more": 1}).encode(),
        json.dumps(GOOD | {DELTA_KEY: 1.5}).encode(),
    ],
    ids=lambda text: text[:24],
)
def test_malformed_text(text: bytes) -> None:
    with pytest.raises(FormatError, match="description of the delta is malformed"):
        parse_delta(text, path="delta")


def test_another_version_is_named_whatever_else_it_says() -> None:
    with pytest.raises(FormatError, match=r"another version of stio.*expected version 1, found 2"):
        parse_delta(b'{"stio.delta":2,"bases":["a","b"]}', path="delta")


@pytest.mark.parametrize("depth", [0, -1, MAX_LINKS + 1, 2**63 - 1])
def test_depth_is_bounded(depth: int) -> None:
    with pytest.raises(LimitError if depth > 0 else FormatError, match="too long" if depth > 0 else "malformed"):
        parse(depth=depth)


@pytest.mark.parametrize(
    "base", ["", ".", "..", "../step-5", "a/../b", "/run/step-5", "a//b", "a/", "./a", "a\0b", "a\\b", "..\\b"]
)
def test_a_base_is_below_the_directory(base: str) -> None:
    with pytest.raises(FormatError, match="path below the directory"):
        parse(base=base)


@pytest.mark.parametrize("base_id", ["", ID.upper(), ID[1:], ID + "0", "md5:" + ID, "sha256:", "sha256:" + "0" * 65])
def test_a_malformed_id(base_id: str) -> None:
    with pytest.raises(FormatError, match="id of the delta's base is malformed"):
        parse(base_id=base_id)


@pytest.mark.parametrize(
    "row",
    [
        ["w", "bf16", [3, 4], 2],
        ["w", "BF16", [3, -4], 2],
        ["w", "BF16", [-3, -4], 2],
        ["w", "BF16", [3, 4], 0],
        ["w", "BF16", [3, 4], 13],
        ["w", "BF16", [0, 4], 1],
        ["w", "F4", [8], 5],
        ["w", "F4", [7], 1],
        ["w", "F6_E2M3", [3], 1],
        ["w", "BF16", [2**62, 2**62], 1],
        ["w", "BF16", [2**62, 2**62, 0], 1],
        ["w", "BF16", [2] * 100_000, 1],
        [DELTA_TENSOR, "BF16", [3, 4], 2],
        [POSITIONS, "U8", [3, 4], 2],
    ],
    ids=lambda row: str(row)[:40],
)
def test_malformed_changed_tensors(row: list[Any]) -> None:
    with pytest.raises(FormatError):
        parse(changed=[row])


def test_a_tensor_is_named_once() -> None:
    with pytest.raises(FormatError, match="names a tensor twice"):
        parse(changed=[GOOD["changed"][0], ["w", "U8", [9], 1]])


# The tensors.

W = parse(changed=GOOD["changed"][:1])


def test_patches_are_ranges_of_the_files() -> None:
    first, second = header_of(("other", "U8", (5,)), (VALUES, "BF16", (2,))), header_of((POSITIONS, "U8", (2,)))
    patch = patches_of(W, [first, second], path="delta")["w"]
    assert (patch.codes, patch.code_bytes) == ((1, second.info(POSITIONS).file_offset, 2), 1)
    assert patch.values == (0, first.info(VALUES).file_offset, 4)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([(POSITIONS, "U8", (2,))], "missing"),
        ([(VALUES, "BF16", (2,))], "missing"),
        ([(POSITIONS, "I8", (2,)), (VALUES, "BF16", (2,))], "positions of 'w'"),
        ([(POSITIONS, "U32", (2,)), (VALUES, "BF16", (2,))], "positions of 'w'"),
        ([(POSITIONS, "U8", (1, 2)), (VALUES, "BF16", (2,))], "positions of 'w'"),
        ([(POSITIONS, "U8", ()), (VALUES, "BF16", (2,))], "positions of 'w'"),
        ([(POSITIONS, "U8", (1,)), (VALUES, "BF16", (2,))], "positions of 'w'"),
        ([(POSITIONS, "U8", (1 << 30,)), (VALUES, "BF16", (2,))], "positions of 'w'"),
        ([(POSITIONS, "U8", (2,)), (VALUES, "BF16", (3,))], "values of 'w'"),
        ([(POSITIONS, "U8", (2,)), (VALUES, "F32", (2,))], "values of 'w'"),
        ([(POSITIONS, "U8", (2,)), (VALUES, "BF16", (2,)), (names_of(1)[0], "U8", (1,))], "does not name"),
        ([(POSITIONS, "U8", (2,)), (VALUES, "BF16", (2,)), (DELTA_TENSOR + "/x\n", "U8", (1,))], "does not name"),
    ],
)
def test_malformed_positions_and_values(tensors: list[tuple[str, str, tuple[int, ...]]], problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        patches_of(W, [header_of(*tensors)], path="delta")


def test_changed_elements_are_shorter_than_their_tensor() -> None:
    """So what a load holds of them is bounded by the tensor, whatever the file says."""
    delta = Delta("base", "0" * 32, 1, True, [ChangedTensor("w", "U8", (300,), 200)])
    for num_codes in (200, 201):
        with pytest.raises(FormatError, match="longer than the tensor"):
            patches_of(delta, [header_of((POSITIONS, "U8", (num_codes,)), (VALUES, "U8", (200,)))], path="delta")


# At random.

_MUTATIONS: list[Callable[[random.Random, Any], Any]] = [
    lambda chance, value: None,
    lambda chance, value: chance.choice([-1, 0, 1, 2**31, 2**63, 2**64, 10**40, 1.5, True]),
    lambda chance, value: chance.choice(["", "..", "\0", "é", "\ud800", "x" * 300, DELTA_TENSOR, "F4", "U8"]),
    lambda chance, value: [value],
    lambda chance, value: {"a": value},
    lambda chance, value: value * chance.choice([0, 2, 50]) if isinstance(value, str | list) else value,
]


def mutated(chance: random.Random, value: Any) -> Any:
    """Return a value with one place in it changed."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        key = chance.choice([*value] if isinstance(value, dict) else range(len(value)))
        changed = value.copy()
        changed[key] = mutated(chance, value[key])
        return changed
    return chance.choice(_MUTATIONS)(chance, value)


@pytest.mark.costly("random cases")
def test_fuzz_descriptions() -> None:
    """Whatever a text says, it is refused by an error of stio, or is a description whose text says the same."""
    chance, num_accepted = random.Random(7), 0
    for _ in range(count(5_000, 500_000)):
        document = GOOD
        for _ in range(chance.randrange(1, 4)):
            document = mutated(chance, document)
        text = bytearray(json.dumps(document).encode())
        for _ in range(chance.choice([0, 0, 0, 1, 3])):
            text[chance.randrange(len(text))] = chance.randrange(256)
        try:
            delta = parse_delta(bytes(text), path="delta")
        except StioError:
            continue
        num_accepted += 1
        assert parse_delta(delta.encode(), path="delta") == delta
        assert all(1 <= one.count <= one.num_elements for one in delta.changed)
        with pytest.raises(FormatError) if delta.changed else pytest.MonkeyPatch.context():
            patches_of(delta, [], path="delta")
    assert num_accepted > 20
