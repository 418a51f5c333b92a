"""Files of `torch.save`: read without running them, mapped where they can be."""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from typing import Any

import torch

from stio.errors import CheckpointNotFoundError, FormatError, StorageError, printable

__all__ = ["is_pickle", "read_pickle"]

_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"


def _head(path: str) -> bytes:
    """Return the first bytes of a file.

    Raises:
        CheckpointNotFoundError: There is none.
        StorageError: The system refused.
    """
    try:
        with open(path, "rb") as file:
            return file.read(len(_ZIP_MAGIC))
    except FileNotFoundError:
        raise CheckpointNotFoundError("there is no such file or directory", path=path) from None
    except OSError as error:
        raise StorageError(
            f"the file cannot be read: {os.strerror(error.errno or errno.EIO)}", path=path, errno=error.errno
        ) from error


def is_pickle(path: str) -> bool:
    """Return whether a file begins as those of `torch.save` do, new and old."""
    head = _head(path)
    return head == _ZIP_MAGIC or (head[:1] == _PICKLE_MAGIC and head[1:2] in (b"\2", b"\3", b"\4", b"\5"))


def read_pickle(path: str, *, map_location: Any = "cpu", trust_pickle: bool = False, mapped: bool = False) -> Any:
    """Return what `torch.save` wrote.

    Args:
        path: The file.
        map_location: As in `torch.load`.
        trust_pickle: Run what the pickle says (`weights_only=False`), with a warning.
        mapped: Map a file of today's format instead of reading it, so that its tensors cost page cache only; one of the
            old format is read whole all the same.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: It is broken, or holds what only `trust_pickle` reads.
        StorageError: The system refused.
    """
    in_zip = _head(path) == _ZIP_MAGIC
    if trust_pickle:
        warnings.warn(
            f"{printable(path)}: unpickling, which can run any code, as trust_pickle=True asks",
            RuntimeWarning,
            stacklevel=3,
        )
    try:
        return torch.load(path, map_location=map_location, mmap=mapped and in_zip, weights_only=not trust_pickle)
    except pickle.UnpicklingError as error:
        hint = "" if trust_pickle else "; trust_pickle=True reads more than tensors and plain values, and runs it"
        raise FormatError(f"the file cannot be unpickled: {_first_line(error)}{hint}", path=path) from error
    except OSError as error:
        raise StorageError(f"the file cannot be read: {printable(str(error))}", path=path, errno=error.errno) from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, ImportError, IndexError) as error:
        raise FormatError(f"not a file of torch.save: {_first_line(error)}", path=path) from error


def _first_line(error: BaseException) -> str:
    """Return what an error says, without the advice to trust the file that torch puts below."""
    lines = [line.strip() for line in str(error).splitlines()]
    for line in lines:
        if "Unsupported" in line or "WeightsUnpickler error" in line:
            return printable(line.split(". ")[0])
    return printable((next(iter(lines), "") or type(error).__name__).split(". ")[0])
