"""All error classes of stio.

    StioError
    ├── FormatError (ValueError)             the file is wrong: header, sizes, offsets
    │   ├── TruncatedError                   fewer bytes than the header describes
    │   └── LimitError                       a limit of the caller or of the format is exceeded
    ├── IndexFormatError (ValueError)        the shard index is wrong, or does not fit its shards
    ├── UnsafePathError (ValueError)         a shard name or a link leads out of the checkpoint's root
    ├── CheckpointNotFoundError (FileNotFoundError)    nothing to load at this path
    ├── AmbiguousCheckpointError (ValueError)          several candidates and no index
    ├── TensorNotFoundError (KeyError)       the checkpoint has no tensor of the requested name
    ├── SliceError (IndexError)              an index does not fit the shape of the tensor
    ├── MismatchError (ValueError)           the target and the checkpoint, or what the ranks save, do not match
    ├── UnsupportedDtypeError (TypeError)    a dtype that this version of torch, or the format, does not have
    ├── ClosedError (RuntimeError)           the object was closed, or its operation was cancelled
    ├── WarmStartError (RuntimeError)        a warm start does not support this module, or this use of it
    ├── IntegrityError (ValueError)          the bytes differ from the manifest, or there is no manifest
    ├── SharedTensorsError (RuntimeError)    tensors to be saved share memory, and shared="error"
    ├── SaveInProgressError (RuntimeError)   a save under way does not allow this call
    ├── ConcurrentSaveError (RuntimeError)   another save changed the destination at the same time
    ├── RankError (RuntimeError)             another rank failed, was cancelled or is silent; has its number
    ├── HostMemoryError (MemoryError)        the host has too little memory; has needed and free bytes
    ├── StorageError (OSError)               the operating system or a store reported an error; has errno
    │   ├── ChangedDuringReadError           the file was changed or replaced during the read
    │   ├── StallTimeoutError (TimeoutError) a remote store sent no bytes for too long
    │   ├── NoSpaceError                     too little space at the destination; has needed and free bytes
    │   └── CommitUncertainError             the new checkpoint is in place, but may not be durable
    └── DeviceError (RuntimeError)           there is no such device, or it refused an allocation or a copy
        └── DeviceMemoryError                the device is out of memory; has needed and free bytes

A wrong call and a wrong file never share a class. Each error has the attributes path, offset, requested, expected and
found, as far as they are known. Errors can be pickled: workers of a process pool raise them too.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    "HostMemoryError",
    "IndexFormatError",
    "IntegrityError",
    "LimitError",
    "MismatchError",
    "NoSpaceError",
    "RankError",
    "SaveInProgressError",
    "SharedTensorsError",
    "SliceError",
    "StallTimeoutError",
    "StioError",
    "StorageError",
    "TensorNotFoundError",
    "TruncatedError",
    "UnsafePathError",
    "UnsupportedDtypeError",
    "WarmStartError",
]

SHOWN_CHARACTERS = 120
"""Most characters of one value in a message."""

SHOWN_NAMES = 5
"""Most names of a list in a message."""

_LISTED_CHARACTERS = 100
"""Most characters of a list, so that its end fits into `SHOWN_CHARACTERS` too."""

_LONGEST_WORD = 40
"""A text is cut before a word of at most this length; a longer word is cut."""

DISTRIBUTION = "stio-torch"
"""Name of the project on the package index. The name `stio` is another project there."""


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, for a message.

    It needs no package index for stio itself: pip reads the extra from the stio that is installed.

    Args:
        extra: Name of the extra, as in pyproject.toml.
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def printable(value: object) -> str:
    """Return untrusted text for a message: control characters escaped, cut between words to `SHOWN_CHARACTERS`."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # a number of more than 4,300 digits, or an object of the program
        text = f"{with_article(type(value).__name__)} without a text ({type(error).__name__})"
    if len(text) > SHOWN_CHARACTERS:
        shown = text[:SHOWN_CHARACTERS]
        if not text[SHOWN_CHARACTERS].isspace():
            start = max(map(shown.rfind, " \t\n"))
            shown = shown[:start] if start >= SHOWN_CHARACTERS - _LONGEST_WORD else shown
        text = f"{shown.rstrip(' ,;')}... ({len(text):,} characters)"
    return one_line(text)


def with_article(name: str) -> str:
    """Return the name of a type for a message: "a dict", "an OrderedDict"."""
    return f"{'an' if name[:1] in tuple('aeioAEIO') else 'a'} {printable(name)}"


def listed(names: Iterable[object], *, separator: str = ", ", more: int = 0) -> str:
    """Return names for a message on one line: the first few of many, and how many others there are, with `more`."""
    every = list(names)
    if not every:
        return "nothing"
    shown: list[str] = []
    for name in map(printable, every[:SHOWN_NAMES]):
        if shown and len(separator.join([*shown, name])) > _LISTED_CHARACTERS:
            break
        shown.append(name)
    left_out = len(every) - len(shown) + more
    return separator.join(shown) + (f" and {left_out:,} other{'s' if left_out > 1 else ''}" if left_out else "")


def one_line(text: str) -> str:
    """Return text with control characters escaped: it stays on one line, and a terminal shows it only."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class StioError(Exception):
    """Base class of all errors that stio raises.

    Args:
        message: The problem, and its remedy.
        path: File or directory of the error.
        offset: Byte offset in that file.
        requested: What the call named, and there is not, or cannot be: a tensor, a key, a device.
        expected: Value that the format, the plan or the call requires.
        found: Value that was found instead.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        requested: object = None,
        expected: object = None,
        found: object = None,
        **details: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.offset = offset
        self.requested = requested
        self.expected = expected
        self.found = found
        self._details = details

    def __str__(self) -> str:
        text = without_path(self)
        return f"{printable(self.path)}: {text}" if self.path is not None else text

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("path", "offset", "requested", "expected", "found")
        fields = {name: getattr(self, name) for name in names}
        return _rebuild, (type(self), self.message, {**fields, **self._details})


def without_path(error: StioError) -> str:
    """Return the text of an error without its path, for a line that names the file already."""
    notes = []
    if error.offset is not None:
        notes.append(f"at byte {error.offset:,}")
    if error.requested is not None:
        notes.append(f"requested {printable(error.requested)}")
    if error.expected is not None:
        notes.append(f"expected {printable(error.expected)}")
    if error.found is not None:
        notes.append(f"found {printable(error.found)}")
    return f"{error.message} ({', '.join(notes)})" if notes else error.message


def _rebuild(cls: type[StioError], message: str, fields: dict[str, Any]) -> StioError:
    return cls(message, **fields)


class FormatError(StioError, ValueError):
    """The file does not follow the safetensors format."""


class TruncatedError(FormatError):
    """The file ends before the data that its header describes."""


class LimitError(FormatError):
    """A file, or what is saved, exceeds a limit: size of the header, number of tensors, rank, size of a state."""


class IndexFormatError(StioError, ValueError):
    """The shard index is malformed or does not fit the shards."""


class UnsafePathError(StioError, ValueError):
    """A shard name or a link leads out of the directory of the checkpoint."""


class CheckpointNotFoundError(StioError, FileNotFoundError):
    """There is no checkpoint at this path."""


class AmbiguousCheckpointError(StioError, ValueError):
    """A directory, or a file of `torch.save`, holds several candidates, and nothing selects one."""


class TensorNotFoundError(StioError, KeyError):
    """The checkpoint has no tensor of this name."""


class SliceError(StioError, IndexError):
    """The index does not fit the shape of the tensor."""


class MismatchError(StioError, ValueError):
    """The target of a load and the checkpoint, or what the ranks save, do not match.

    They differ in names or shapes, or the target has tensors that cannot be filled.
    """


class UnsupportedDtypeError(StioError, TypeError):
    """This version of torch, or the safetensors format, does not have the dtype or the cast."""


class ClosedError(StioError, RuntimeError):
    """The object was closed before or during this call, or its operation was cancelled."""


class WarmStartError(StioError, RuntimeError):
    """A warm start does not support this module, or this use of a parameter that is not loaded yet."""


class _ShortageError(StioError):
    """Has the bytes that are needed and free."""

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None, **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self._details |= {"needed_bytes": needed_bytes, "free_bytes": free_bytes}


class HostMemoryError(_ShortageError, MemoryError):
    """The host has too little memory, or this process may not use it: `free_bytes` of `needed_bytes`.

    `free_bytes` includes memory that the kernel can reclaim. It is the least that the machine, the control groups of
    the process and its limit of address space leave.
    """


class StorageError(StioError, OSError):
    """The operating system or a remote store reported an error; `errno` is its number, or the nearest one."""

    def __init__(self, message: str, *, errno: int | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.errno = errno
        self._details["errno"] = errno


class ChangedDuringReadError(StorageError):
    """The file was changed or replaced between the plan and the end of the read."""


class StallTimeoutError(StorageError, TimeoutError):
    """A remote store sent no bytes for too long, in every attempt."""


class NoSpaceError(_ShortageError, StorageError):
    """There is too little space for the checkpoint: `free_bytes` of `needed_bytes`."""


class CommitUncertainError(StorageError):
    """The new checkpoint is in place, but the system did not confirm that it survives a power cut."""


class IntegrityError(StioError, ValueError):
    """The bytes of a file differ from the manifest of the checkpoint, or there is no manifest to compare them with."""


class SharedTensorsError(StioError, RuntimeError):
    """Tensors to be saved share memory, and the call has `shared="error"`."""


class SaveInProgressError(StioError, RuntimeError):
    """A saver has `max_pending` saves under way, or a thread of a save would wait for that save."""


class ConcurrentSaveError(StioError, RuntimeError):
    """Another save changed the destination, or held its lock for too long; this save was rolled back."""


class RankError(StioError, RuntimeError):
    """An operation of many ranks has failed on another rank.

    `ranks` has the numbers of the ranks that failed; it is empty if they are not known. `__cause__` is the error of
    such a rank, if it could be sent.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.ranks = tuple(ranks)
        self._details["ranks"] = self.ranks


class DeviceError(StioError, RuntimeError):
    """There is no such device, `device=` has none for a tensor, or the device refused an allocation or a copy."""


class DeviceMemoryError(_ShortageError, DeviceError):
    """The device has too little free memory: `free_bytes` of `needed_bytes`."""
