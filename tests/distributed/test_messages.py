"""What ranks send each other is plain data: errors arrive as what they were, and nothing that is received is executed."""

from __future__ import annotations

import builtins
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stio import errors
from stio.distributed import load as broadcast
from stio.distributed.agreement import _Compared
from stio.distributed.ranks import _described, _RankFailure, decoded
from stio.distributed.sharded_write import _unpack
from stio.errors import MismatchError, RankError, StioError, StorageError
from stio.runtime.operation import PanicError
from stio.storage.commit.transaction import Invitation
from tests.storage.transactions import begin_local


def sent(error: Exception) -> BaseException | None:
    """Return an error as another rank gets it."""
    failure = decoded(msgspec.json.encode(_described(1, "load", error)), _RankFailure, decode=msgspec.json.decode)
    assert failure.ranks == (1,) and type(error).__name__ in failure.text
    return None if failure.error is None else failure.error.error(failure.told_by)


FIELDS = {"path": "/x", "offset": 7, "requested": "w", "expected": [1, 2], "found": "F32", "errno": 5}
OWN_FIELDS = {"needed_bytes": 9, "free_bytes": 1, "ranks": (3, 4)}


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error_of_stio_arrives_as_what_it_was(name: str) -> None:
    error: StioError = getattr(errors, name)("not this one", **FIELDS, **OWN_FIELDS)
    found = sent(error)
    assert type(found) is type(error) and str(found) == str(error)
    names = [one for one in (*FIELDS, *OWN_FIELDS) if hasattr(error, one) and one != "expected"]
    assert {one: getattr(found, one) for one in names} == {one: getattr(error, one) for one in names}


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a value"),
        TypeError(),
        KeyError("w"),
        MemoryError(),
        OSError(5, "a disk"),
        FileNotFoundError(2, "nothing here", "/x/é"),
        OSError("a\udcffb"),
        RuntimeError("a", 1, None, 2.5, True),
        NotImplementedError("x" * 10_000),
    ],
)
def test_errors_of_python_arrive_as_what_they_were(error: Exception) -> None:
    found = sent(error)
    assert type(found) is type(error)
    if len(str(error)) < 5000:
        assert str(found) == str(error).encode(errors="backslashreplace").decode()
    else:
        assert str(found).endswith("... (10,000 characters)")


class OwnError(Exception):
    """Of a class that other ranks may not have."""


class OwnValueError(ValueError):
    """The same; it is not taken for a class of Python's."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OwnError("a", "b"), "OwnError: ('a', 'b')"),
        (OwnValueError("c"), "OwnValueError: c"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), "UnicodeDecodeError: 'utf-8' codec"),  # has bytes
        (ValueError(object), "ValueError: <class 'object'>"),
        (ValueError(b"bytes"), "ValueError: b'bytes'"),
        (ExceptionGroup("g", [ValueError("d")]), "ExceptionGroup: g (1 sub-exception)"),
    ],
)
def test_other_errors_are_one_typed_error_with_text_and_class(error: Exception, text: str) -> None:
    found = sent(error)
    assert type(found) is RankError and str(found).startswith(text) and found.ranks == (1,)


def test_a_subclass_of_an_error_of_stio_is_that_error() -> None:
    found = sent(PanicError("a panic", errno=5, cause="x"))
    assert type(found) is StorageError and found.errno == 5 and found.message == "a panic"


def test_fields_that_are_no_plain_data_are_sent_as_they_are_shown() -> None:
    error = MismatchError("differs", expected=np.float32, found={"a": object})
    found = sent(error)
    assert type(found) is MismatchError and str(found) == str(error)
    odd = sent(StioError("odd", offset=np.int64(3)))  # type: ignore[arg-type]
    assert type(odd) is RankError and str(odd) == "StioError: odd (at byte 3)"


@pytest.mark.parametrize(
    "error",
    [
        ValueError(10**5000),
        ValueError(*["x" * 4096] * 3000),
        ValueError(type("Own", (int,), {})(3)),
        ValueError(float("nan")),
    ],
    ids=["a number without a text", "12 MB", "a subclass", "NaN"],
)
def test_an_error_that_cannot_be_sent_whole_is_sent_as_text(error: Exception) -> None:
    assert len(msgspec.json.encode(_described(1, "load", error))) < 1 << 20
    found = sent(error)
    assert type(found) is RankError and str(found).startswith("ValueError: ")


def test_a_field_of_a_subclass_is_sent_as_it_is_shown() -> None:
    found = sent(StorageError("odd", found=np.float64(3)))
    assert type(found) is StorageError and found.found == repr(np.float64(3))


# What no rank of stio sends.


class Executed:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


FAILURE = {"told_by": 1, "ranks": [1], "text": "x"}
ERROR = {"kind": "StioError", "text": "x"}


def hostile_failures(folder: Path) -> dict[str, bytes]:
    def with_error(**fields: Any) -> bytes:
        return json.dumps({**FAILURE, "error": {**ERROR, **fields}}).encode()

    return {
        "pickle": pickle.dumps(Executed(f"{folder}/executed")),
        "empty": b"",
        "no text": b"\xff\xfe",
        "other type": b"[1, 2]",
        "missing": json.dumps({"told_by": 1}).encode(),
        "unknown field": json.dumps({**FAILURE, "pickled": "x"}).encode(),
        "wrong ranks": json.dumps({**FAILURE, "ranks": "all"}).encode(),
        "wrong text": with_error(text=5),
        "wrong arguments": with_error(arguments=[{"x": 1}]),
        "wrong fields": with_error(fields={"path": ["x"]}),
        "unknown field of an error": with_error(message="x"),
        "nested": b'{"error": ' + b"[" * 1_000_000,
        "nested in an unknown field": b'{"x": ' + b'{"x": ' * 1_000_000,
        "long": b'"' + b"x" * (4 << 20) + b'"',
    }


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("something is executed")

    for owner, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (builtins, "exec")):
        monkeypatch.setattr(owner, name, refuse)


@pytest.mark.parametrize("name", hostile_failures(Path()))
def test_a_failure_that_is_malformed(name: str, tmp_path: Path, no_pickle: None) -> None:
    with pytest.raises(RankError, match="do all ranks run the same stio"):
        decoded(hostile_failures(tmp_path)[name], _RankFailure, decode=msgspec.json.decode)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "kind", ["SystemExit", "KeyboardInterrupt", "eval", "exec", "object", "Ranks", "__import__", ""]
)
def test_a_class_that_is_no_error(kind: str, no_pickle: None) -> None:
    data = json.dumps({**FAILURE, "error": {"kind": kind, "text": "x", "arguments": ["1/0"]}}).encode()
    failure = decoded(data, _RankFailure, decode=msgspec.json.decode)
    assert type(failure.error.error(1)) is RankError


@pytest.mark.parametrize("fields", [{"offset": "x"}, {"message": "x"}, {"ranks": 5}, {"": None}])
def test_fields_that_a_class_does_not_take(fields: dict[str, Any]) -> None:
    error = {"kind": "RankError", "text": "x: y", "arguments": ["z"], "fields": fields}
    found = decoded(json.dumps({**FAILURE, "error": error}).encode(), _RankFailure, decode=msgspec.json.decode)
    assert str(found.error.error(1)) in ("RankError: x: y", "z")


@pytest.mark.parametrize("arguments", [[], ["a"] * 9, [None, None], [2, "no such file", "x", 1, "y", 2]])
@pytest.mark.parametrize("kind", ["UnicodeDecodeError", "OSError", "ExceptionGroup", "StopIteration", "SyntaxError"])
def test_arguments_that_a_class_does_not_take(kind: str, arguments: list[Any]) -> None:
    data = json.dumps({**FAILURE, "error": {"kind": kind, "text": "x", "arguments": arguments}}).encode()
    found = decoded(data, _RankFailure, decode=msgspec.json.decode).error.error(1)
    assert isinstance(found, Exception) and isinstance(str(found), str)


PACKED = [pickle.dumps(Executed("x")), b"", b"\xc1", b"\x91" * 1_000_000, b"\x81\xa1x" * 1_000_000, b"\xc4\x01aa"]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [bytes, list[int], dict[int, str], tuple[str, ...], broadcast._Need | None, _Compared])
@pytest.mark.parametrize("data", [*PACKED, msgspec.msgpack.encode(1), b"\xc4" * (4 << 20)])
def test_a_value_that_is_malformed(data: bytes, kind: Any, no_pickle: None) -> None:
    with pytest.raises(RankError, match="rank 2 has sent"):
        decoded(data, kind, rank=2)


@pytest.mark.parametrize("chunk_bytes", [0, -1, 1 << 40])
def test_a_decision_with_a_size_that_no_rank_chooses(chunk_bytes: int) -> None:
    with pytest.raises(RankError):
        decoded(msgspec.msgpack.encode([chunk_bytes, []]), broadcast._Agreement)


@pytest.mark.parametrize("rows", [[], [(0, 3)], [(0, 3)] * 3, [(0, 11), (0, 0)], [(-1, 3), (0, 0)], [(3, 1), (0, 0)]])
def test_rows_that_no_tensor_has(rows: list[tuple[int, int]]) -> None:
    tensors = [broadcast.RowTensor(name, 0, 0, "U8", (10,), broadcast.Rows(0, 10, 1)) for name in "ab"]
    broadcast._require_rows([(0, 10), (2, 3)], tensors)
    with pytest.raises(RankError, match="no valid rows"):
        broadcast._require_rows(rows, tensors)


def message(*run: int, num_runs: int = 1, nbytes: int = 8) -> np.ndarray[Any, Any]:
    return np.concatenate([np.array([num_runs, *run], np.int64).view(np.uint8), np.full(nbytes, 7, np.uint8)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.empty(3, np.uint8),
        lambda: message(100, 0, 8, 1, 0, num_runs=2),
        lambda: message(100, 0, 8, 1, 0, num_runs=-1),
        lambda: message(100, 0, 8, 1, 0, num_runs=1 << 60),
        lambda: message(99, 0, 8, 1, 0),  # before the window
        lambda: message(157, 0, 8, 1, 0),  # after it
        lambda: message(100, 0, 9, 1, 0),  # more than there is
        lambda: message(100, 1, 8, 1, 0),
        lambda: message(100, -1, 8, 1, 0),
        lambda: message(100, 0, -8, 1, 0),
        lambda: message(140, 0, 1, 8, -5),  # the places go back, before the window
        lambda: message(100, 0, 1, -1, 1),
        lambda: message(100, 0, 2, 4, 1),  # they overlap
        lambda: message(100, 0, 0, 1 << 40, 1),
    ],
)
def test_a_message_that_names_other_memory(make: Callable[[], np.ndarray[Any, Any]]) -> None:
    """Nothing is written outside of the window."""
    memory = np.zeros(192, np.uint8)
    image = memory[64:128]
    assert _unpack(message(100, 0, 1, 8, 2), image, 100) == 8 and image[:16:2].all()
    memory[:] = 0
    with pytest.raises(RankError, match="a rank has sent"):
        _unpack(make(), image, 100)
    assert not memory[:64].any() and not memory[128:].any()


@pytest.mark.parametrize(
    "change", [{"staging": 5}, {"shard_names": [1]}, {"shard_names": None}, {"is_file": "no"}, {"other": 1}, None]
)
def test_an_invitation_that_is_malformed(change: dict[str, Any] | None, tmp_path: Path, no_pickle: None) -> None:
    owner = begin_local(tmp_path / "é\udcff", num_shards=2)
    owner.create([1, 1], [0, 0])
    good = owner.invite()
    owner.roll_back()
    assert Invitation.from_json(good.to_json()) == good
    values = json.loads(good.to_json())
    data = pickle.dumps(Executed("x")) if change is None else json.dumps({**values, **change}).encode()
    with pytest.raises(StorageError, match="no valid invitation"):
        Invitation.from_json(data)
