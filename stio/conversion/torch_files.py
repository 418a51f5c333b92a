"""Files of `torch.save`: read without executing them, and mapped where their format allows it."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import torch

from stio.errors import CheckpointNotFoundError, FormatError, StorageError, printable
from stio.storage.checks import refused

_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"


def read_start(path: str, nbytes: int) -> bytes:
    """Return the first bytes of a file, at most `nbytes`.

    Raises:
        CheckpointNotFoundError: There is no such file.
        StorageError: The operating system reported an error.
    """
    try:
        with open(path, "rb") as file:
            return file.read(nbytes)
    except FileNotFoundError:
        raise CheckpointNotFoundError("there is no such file or directory", path=path) from None
    except OSError as error:
        raise refused("reading the file", path, error) from error


def is_pickle(path: str) -> bool:
    """Return whether a file starts like one of `torch.save`, in its new or its old format."""
    head = read_start(path, len(_ZIP_MAGIC))
    return head == _ZIP_MAGIC or (head[:1] == _PICKLE_MAGIC and head[1:2] in (b"\2", b"\3", b"\4", b"\5"))


def read_pickle(path: str, *, map_location: Any = "cpu", trust_pickle: bool = False, mapped: bool = False) -> Any:
    """Return the object that `torch.save` wrote.

    Args:
        path: The file.
        map_location: As in `torch.load`.
        trust_pickle: Execute the code in the pickle (`weights_only=False`), with a warning.
        mapped: Map a file of the new format instead of reading it, so that its tensors cost page cache only. A file of
            the old format is read in any case.

    Raises:
        CheckpointNotFoundError: There is no such file.
        FormatError: It is broken, or holds objects that only `trust_pickle` reads.
        StorageError: The operating system reported an error.
    """
    in_zip = read_start(path, len(_ZIP_MAGIC)) == _ZIP_MAGIC
    if trust_pickle:
        warnings.warn(
            f"{printable(path)}: unpickling, which can run any code, because of trust_pickle=True",
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
    """Return the reason in an error of torch, without its advice to trust the file."""
    lines = [line.strip() for line in str(error).splitlines()]
    for line in lines:
        if "Unsupported" in line or "WeightsUnpickler error" in line:
            return printable(line.split(". ")[0])
    return printable((next(iter(lines), "") or type(error).__name__).split(". ")[0])
