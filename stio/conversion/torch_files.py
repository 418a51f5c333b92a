"""Files of `torch.save`: read without executing them, and mapped where their format allows it."""

from __future__ import annotations

import os
import pickle
import warnings
from typing import Any

import torch

from stio.errors import FormatError, HostMemoryError, StorageError, printable
from stio.format.other_sources import PICKLE_START_BYTES, is_pickle_start, is_zip_start
from stio.runtime.memory import reporting_shortage
from stio.storage.checks import OPEN_FLAGS, require_regular, translated_errors
from stio.storage.mapped import log_unmapped


def read_start(path: str, nbytes: int) -> bytes:
    """Return the first bytes of a file, at most `nbytes`.

    Raises:
        CheckpointNotFoundError: There is no such file.
        StorageError: It is no regular file, or the operating system reported an error.
    """
    with translated_errors(path, "reading the file"), open(os.open(path, OPEN_FLAGS), "rb") as file:
        require_regular(os.fstat(file.fileno()), path)
        return file.read(nbytes)


def is_pickle(path: str) -> bool:
    """Return whether a file starts like one of `torch.save`, in its new or its old format."""
    return is_pickle_start(read_start(path, PICKLE_START_BYTES))


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
        HostMemoryError: The host has too little memory for its tensors.
        StorageError: The operating system reported an error.
    """
    in_zip = is_zip_start(read_start(path, PICKLE_START_BYTES))
    if trust_pickle:
        warnings.warn(
            f"{printable(path)}: unpickling, which can run any code, because of trust_pickle=True",
            RuntimeWarning,
            stacklevel=3,
        )
    try:
        with reporting_shortage(path):
            return _load(path, map_location=map_location, mmap=mapped and in_zip, weights_only=not trust_pickle)
    except HostMemoryError:
        raise
    except pickle.UnpicklingError as error:
        hint = "" if trust_pickle else "; trust_pickle=True reads more than tensors and plain values, and runs it"
        raise FormatError(f"the file cannot be unpickled: {_first_line(error)}{hint}", path=path) from error
    except OSError as error:
        raise StorageError(f"the file cannot be read: {printable(str(error))}", path=path, errno=error.errno) from error
    except Exception as error:  # torch raises nearly any error for a malformed file
        raise FormatError(f"not a file of torch.save: {_first_line(error)}", path=path) from error


def _load(path: str, *, mmap: bool, **options: Any) -> Any:
    """Return `torch.load` of a file; one that the system does not map is read."""
    try:
        return torch.load(path, mmap=mmap, **options)
    except RuntimeError as error:  # before anything is unpickled
        if not mmap or not str(error).startswith("unable to mmap "):
            raise
        log_unmapped(path, _first_line(error))
        return torch.load(path, mmap=False, **options)


def _first_line(error: BaseException) -> str:
    """Return the reason in an error of torch, without its advice to trust the file."""
    lines = [line.strip() for line in str(error).splitlines()]
    for line in lines:
        if "Unsupported" in line or "WeightsUnpickler error" in line:
            return printable(line.split(". ")[0])
    return printable((next(iter(lines), "") or type(error).__name__).split(". ")[0])
