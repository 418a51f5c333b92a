"""Every error that stio raises on purpose.

    StioError
    ├── FormatError (ValueError)             the file is wrong: header, sizes, offsets
    │   ├── TruncatedError                   fewer bytes than the header promises
    │   └── LimitError                       a limit of the caller's (or the format's) is exceeded
    ├── IndexFormatError (ValueError)        the shard index is wrong, or does not fit its shards
    ├── UnsafePathError (ValueError)         a shard name leads out of the checkpoint's root
    ├── CheckpointNotFoundError (FileNotFoundError)    nothing to load at this path
    ├── AmbiguousCheckpointError (ValueError)          several candidates and no index
    ├── TensorNotFoundError (KeyError)       the caller asks for a name the checkpoint lacks
    ├── SliceError (IndexError)              the caller's index does not fit the tensor
    ├── MismatchError (ValueError)           a module and a checkpoint do not fit each other
    ├── UnsupportedDtypeError (TypeError)    a dtype that torch (or this torch) has no type for
    ├── ClosedError (RuntimeError)           the checkpoint or stream was closed
    ├── WarmStartError (RuntimeError)        a module, or a use of it, that cannot wait for a warm start
    ├── IntegrityError (ValueError)          the bytes are not those that the manifest promises
    ├── SharedTensorsError (RuntimeError)    tensors to be saved share memory, and shared="error"
    ├── SaveInProgressError (RuntimeError)   a saver has as many saves under way as it may
    ├── ConcurrentSaveError (RuntimeError)   another save changed the destination meanwhile
    ├── StorageError (OSError)               the operating system refused; carries errno
    │   ├── ChangedDuringReadError           the file is another one than the one that was planned
    │   ├── NoSpaceError                     no room at the destination; carries needed and free bytes
    │   └── CommitUncertainError             the new checkpoint is in place, but perhaps not durable
    └── DeviceError (RuntimeError)           the device refused an allocation or a copy
        └── DeviceMemoryError                out of memory there; carries needed and free bytes

"Your call is wrong" and "the file is wrong" never share a class. Each error carries what is known of
path, offset, expected and found, and survives pickling (workers of a process pool raise them too).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AmbiguousCheckpointError",
    "ChangedDuringReadError",
    "CheckpointNotFoundError",
    "ClosedError",
    "CommitUncertainError",
    "ConcurrentSaveError",
    "DeviceError",
    "DeviceMemoryError",
    "FormatError",
    "IndexFormatError",
    "IntegrityError",
    "LimitError",
    "MismatchError",
    "NoSpaceError",
    "SaveInProgressError",
    "SharedTensorsError",
    "SliceError",
    "StioError",
    "StorageError",
    "TensorNotFoundError",
    "TruncatedError",
    "UnsafePathError",
    "UnsupportedDtypeError",
    "WarmStartError",
]

SHOWN_CHARACTERS = 120


def printable(value: object) -> str:
    """Return untrusted text for a message: control characters escaped, cut to a line's length."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]}... ({len(text):,} characters)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class StioError(Exception):
    """Root of all errors that stio raises.

    Args:
        message: What went wrong, and what to do about it.
        path: The file or directory it happened in.
        offset: Byte offset in that file.
        expected: What the format, the plan or the caller asked for.
        found: What was there instead.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
        **details: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.offset = offset
        self.expected = expected
        self.found = found
        self._details = details

    def __str__(self) -> str:
        text = without_path(self)
        return f"{printable(self.path)}: {text}" if self.path is not None else text

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {"path": self.path, "offset": self.offset, "expected": self.expected, "found": self.found}
        return _rebuild, (type(self), self.message, {**fields, **self._details})


def without_path(error: StioError) -> str:
    """Return what an error says, for a line that names its file already."""
    notes = []
    if error.offset is not None:
        notes.append(f"at byte {error.offset:,}")
    if error.expected is not None:
        notes.append(f"expected {printable(error.expected)}")
    if error.found is not None:
        notes.append(f"found {printable(error.found)}")
    return f"{error.message} ({', '.join(notes)})" if notes else error.message


def _rebuild(cls: type[StioError], message: str, fields: dict[str, Any]) -> StioError:
    return cls(message, **fields)


class FormatError(StioError, ValueError):
    """The file is not what the safetensors format says."""


class TruncatedError(FormatError):
    """The file ends before the bytes that its header promises."""


class LimitError(FormatError):
    """The file exceeds a limit: header size, number of tensors, rank."""


class IndexFormatError(StioError, ValueError):
    """The shard index is malformed or does not fit the shards."""


class UnsafePathError(StioError, ValueError):
    """A shard name or link leads out of the checkpoint's root."""


class CheckpointNotFoundError(StioError, FileNotFoundError):
    """There is no checkpoint at this path."""


class AmbiguousCheckpointError(StioError, ValueError):
    """A directory holds several candidates and no index that chooses."""


class TensorNotFoundError(StioError, KeyError):
    """The checkpoint has no tensor of this name."""


class SliceError(StioError, IndexError):
    """The index does not fit the tensor's shape."""


class MismatchError(StioError, ValueError):
    """A module and a checkpoint differ in names or shapes."""


class UnsupportedDtypeError(StioError, TypeError):
    """The dtype has no counterpart in this torch."""


class ClosedError(StioError, RuntimeError):
    """The object was closed before this call."""


class WarmStartError(StioError, RuntimeError):
    """A module, or a use of its parameters, that cannot wait until a warm start is done."""


class StorageError(StioError, OSError):
    """The operating system refused; `errno` says why."""

    def __init__(self, message: str, *, errno: int | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.errno = errno
        self._details["errno"] = errno


class ChangedDuringReadError(StorageError):
    """The file was rewritten or replaced between planning and the end of the read."""


class NoSpaceError(StorageError):
    """There is no room for the checkpoint; `needed_bytes` and `free_bytes` say how much there would have to be."""

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None, **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self._details |= {"needed_bytes": needed_bytes, "free_bytes": free_bytes}


class CommitUncertainError(StorageError):
    """The new checkpoint was put in place, but the system did not confirm that it survives a power cut."""


class IntegrityError(StioError, ValueError):
    """The bytes of a file are not those that the checkpoint's manifest promises."""


class SharedTensorsError(StioError, RuntimeError):
    """Tensors that are to be saved share memory, and the caller wanted an error for that."""


class SaveInProgressError(StioError, RuntimeError):
    """A saver has as many saves under way as it may."""


class ConcurrentSaveError(StioError, RuntimeError):
    """Another save changed the destination while this one was under way; this one was rolled back."""


class DeviceError(StioError, RuntimeError):
    """The device refused an allocation or a copy."""


class DeviceMemoryError(DeviceError):
    """The device has too little free memory; `needed_bytes` and `free_bytes` say how much."""

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None, **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self._details |= {"needed_bytes": needed_bytes, "free_bytes": free_bytes}
