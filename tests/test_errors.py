"""Errors: one tree, builtin parents where they fit, everything survives pickling and terminals."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle

import pytest

from stio import errors
from stio.errors import StioError, printable
from stio.limits import checked_size

CLASSES = [
    cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, StioError) and not name.startswith("_")
]

PARENTS = {
    "FormatError": ValueError, "TruncatedError": ValueError, "LimitError": ValueError, "IndexFormatError": ValueError,
    "UnsafePathError": ValueError, "CheckpointNotFoundError": FileNotFoundError, "AmbiguousCheckpointError": ValueError,
    "TensorNotFoundError": KeyError, "SliceError": IndexError, "MismatchError": ValueError,
    "UnsupportedDtypeError": TypeError, "ClosedError": RuntimeError, "WarmStartError": RuntimeError, "StorageError": OSError,
    "ChangedDuringReadError": OSError, "NoSpaceError": OSError, "StallTimeoutError": TimeoutError, "CommitUncertainError": OSError, "IntegrityError": ValueError,
    "SharedTensorsError": RuntimeError, "SaveInProgressError": RuntimeError, "ConcurrentSaveError": RuntimeError, "DeviceError": RuntimeError, "DeviceMemoryError": RuntimeError,
    "HostMemoryError": MemoryError, "RankError": RuntimeError,
}  # fmt: skip


def make(cls):
    fields = {"path": "/a/b", "offset": 4096, "expected": (1, "x"), "found": None, "requested": None}
    if issubclass(cls, errors.StorageError):
        fields["errno"] = errno.EIO
    if issubclass(cls, errors.DeviceMemoryError | errors.HostMemoryError | errors.NoSpaceError):
        fields |= {"needed_bytes": 10, "free_bytes": 3}
    return cls("it went wrong", **fields), fields


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class(cls):
    assert cls.__name__ in errors.__all__
    if cls is not StioError:
        assert issubclass(cls, PARENTS[cls.__name__])
    error, fields = make(cls)
    for other in [pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]:
        assert type(other) is cls
        assert other.message == "it went wrong"
        assert str(other) == str(error)
        assert {name: getattr(other, name) for name in fields} == fields
    assert str(error) == "/a/b: it went wrong (at byte 4,096, expected (1, 'x'))"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_message_alone_is_enough(cls):
    error = cls("short")
    assert str(error) == "short"
    assert str(pickle.loads(pickle.dumps(error))) == "short"
    with pytest.raises(cls):
        raise error


def test_the_tree_is_drawn_and_complete():
    assert {cls.__name__ for cls in CLASSES} == set(errors.__all__)
    for cls in CLASSES:
        assert cls.__name__ in errors.__doc__
        assert cls.__doc__


def test_os_errors_are_caught_by_their_number():
    error = errors.StorageError("reading failed", errno=errno.ENOSPC, path="x")
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert pickle.loads(pickle.dumps(error)).errno == errno.ENOSPC


def test_key_error_is_not_quoted():
    assert str(errors.TensorNotFoundError("no such tensor", found="a")) == "no such tensor (found a)"


def test_notes_and_causes_are_pythons():
    error = errors.FormatError("x")
    error.add_note("more")
    assert error.__notes__ == ["more"]


@pytest.mark.parametrize(
    "text", ["\x1b[31mred", "a\nb", "\x00", "\x7f", "\u202e", "\ud800", "a\rb", "\x9b1m", "\u2028"]
)
def test_control_characters_are_escaped(text):
    error = errors.TensorNotFoundError("no", path=f"dir/{text}", expected=text, found=text)
    shown = str(error)
    assert shown.isprintable()
    shown.encode()
    assert text not in shown


def test_untrusted_text_is_cut():
    assert len(printable("x" * 10_000_000)) < 200
    assert "10,000,000 characters" in printable("x" * 10_000_000)
    assert printable("naïve 名前") == "naïve 名前"
    assert printable(12) == "12"


def test_a_value_without_a_text_is_named_by_its_type() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert printable(Broken()) == "a Broken without a text (RuntimeError)"
    assert printable(10**5000) == "an int without a text (ValueError)"
    with pytest.raises(ValueError, match="max_shard_size: a size must be positive, not an int"):
        checked_size(-(10**5000), "max_shard_size")
