"""Files of `torch.save`: read without executing them, and mapped where their format allows it."""

from __future__ import annotations

import os
import pickle
import re
import sys
import warnings
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch

from stio.errors import FormatError, HostMemoryError, StorageError, printable
from stio.format.file_kinds import HEAD_BYTES, FileKind, kind_of, starts_like_safetensors
from stio.format.naming import FILE_SUFFIX
from stio.runtime.memory import reporting_shortage
from stio.storage.checks import OPEN_FLAGS, require_regular, translated_errors
from stio.storage.local import log_unmapped


def read_start(path: str, nbytes: int) -> bytes:
    """Return the first bytes of a file, at most `nbytes`.

    Raises:
        CheckpointNotFoundError: There is no such file.
        StorageError: It is no regular file, or the operating system reported an error.
    """
    with translated_errors(path, "reading the file"), open(os.open(path, OPEN_FLAGS), "rb") as file:
        require_regular(os.fstat(file.fileno()), path)
        return file.read(nbytes)


def kind_of_file(path: str) -> FileKind | None:
    """Return the kind of a file that is not safetensors; None: it may be safetensors, or is of no known kind.

    Raises:
        CheckpointNotFoundError: There is no such file.
        StorageError: It is no regular file, or the operating system reported an error.
    """
    with translated_errors(path, "reading the file"), open(os.open(path, OPEN_FLAGS), "rb") as file:
        status = os.fstat(file.fileno())
        require_regular(status, path)
        return kind_of(lambda begin, end: os.pread(file.fileno(), end - begin, begin), status.st_size)


def is_safetensors(path: str) -> bool:
    """Return whether a file starts like one of safetensors."""
    return starts_like_safetensors(read_start(path, HEAD_BYTES), os.stat(path).st_size)


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
        FormatError: It is broken or of another kind, holds objects that only `trust_pickle` reads, or needs a module
            that is not here.
        HostMemoryError: The host has too little memory for its tensors.
        StorageError: The operating system reported an error.
    """
    kind = kind_of_file(path)
    if kind is None:
        raise FormatError("not a file of torch.save, by its first bytes; fetch it again", path=path)
    if not kind.is_torch_save:
        raise FormatError(kind.refusal(path), path=path)
    in_zip = read_start(path, len(_ZIP_START)) == _ZIP_START
    if trust_pickle:
        warnings.warn(
            f"{printable(path)}: unpickling, which can run any code, because of trust_pickle=True",
            RuntimeWarning,
            stacklevel=3,
        )
    try:
        with reporting_shortage(path), ExitStack() as closing:
            source: Any = path
            if path.endswith(FILE_SUFFIX):  # torch would read it as safetensors
                source = closing.enter_context(open(path, "rb"))
            mapped = mapped and in_zip and source is path
            return _load(source, map_location=map_location, mmap=mapped, weights_only=not trust_pickle)
    except HostMemoryError:
        raise
    except pickle.UnpicklingError as error:
        refused = None if trust_pickle else _REFUSED.search(str(error))
        if refused is not None:
            raise FormatError(_about_class(refused[1], is_blocked="is blocked" in str(error)), path=path) from error
        hint = "" if trust_pickle else _ON_TRUST
        raise FormatError(f"the file cannot be unpickled: {_reason(error)}{hint}", path=path) from error
    except OSError as error:
        raise StorageError(f"the file cannot be read: {printable(str(error))}", path=path, errno=error.errno) from error
    except Exception as error:  # torch raises nearly any error for a malformed file
        lacking = _lacking(error)
        if lacking:
            raise FormatError(f"the file needs {lacking}; {_IN_THE_PROGRAM}", path=path) from error
        raise FormatError(f"the file is damaged: {_reason(error)}; fetch it again", path=path) from error


def _load(source: Any, *, mmap: bool, **options: Any) -> Any:
    """Return `torch.load` of a file; one that the system does not map is read."""
    try:
        return torch.load(source, mmap=mmap, **options)
    except RuntimeError as error:  # before anything is unpickled
        if not mmap or not str(error).startswith("unable to mmap "):
            raise
        log_unmapped(source, _reason(error))
        return torch.load(source, mmap=False, **options)


_ZIP_START = b"PK\x03\x04"
_REFUSED = re.compile(r"GLOBAL ([A-Za-z_][\w.]*)")
_LACKING = re.compile(r"Can't get attribute '([^']+)' on <module '([^']+)'")

_ON_TRUST = "; trust_pickle=True reads more than tensors and plain values, and runs code that the file chose"
_IN_THE_PROGRAM = "save its state_dict() with the program that wrote it"


def _about_class(name: str, *, is_blocked: bool) -> str:
    """Return the message about a class or function that is not read without trust."""
    module = name.partition(".")[0]
    text = f"the file holds an object that needs {printable(name)}, and stio reads tensors and plain values only"
    if is_blocked:
        return f"{text}; that is code which no checkpoint needs: do not read the file with trust_pickle=True"
    if module == "__main__":
        return f"{text}; it is of the script that wrote the file, so {_IN_THE_PROGRAM}"
    if module in sys.modules or find_spec(module) is not None:
        return text + _ON_TRUST
    return f"{text}; its module {printable(module)!r} is not installed here, so {_IN_THE_PROGRAM}"


def _lacking(error: Exception) -> str:
    """Return the module, or the name in one, that unpickling needs and that is not here; empty: it lacks none."""
    if isinstance(error, ImportError):
        return f"the module {printable(error.name or str(error))!r}, which cannot be imported here"
    found = _LACKING.search(str(error)) if isinstance(error, AttributeError) else None
    if found is None:
        return ""
    where = "the script that wrote it" if found[2] == "__main__" else f"the module {printable(found[2])!r}"
    return f"{printable(found[1])!r} of {where}, which is not here"


def _reason(error: BaseException) -> str:
    """Return the first sentence of the reason in an error of torch, without its advice to trust the file."""
    text = str(error)
    text = text.partition("WeightsUnpickler error:")[2] or text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[0].split(". ")[0] if lines else type(error).__name__)
