"""The original's single error class, and the conversion of stio's errors to it.

A malformed file or a wrong call is a `SafetensorError`: the original's phrase, then stio's details. If the operating
system refuses a read, the error is the `OSError` that `open` would raise.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping

from stio.errors import CheckpointNotFoundError, LimitError, StioError, StorageError, TruncatedError, printable
from stio.format.companions import why_packed
from stio.runtime.process import contextmanager


class ErrorBase(Exception):
    """Base of `SafetensorError`, for which `stio.compat.install` puts the original's error class.

    Python replaces a base class only by one of the same layout, which `Exception` itself, no class of Python, has not.
    """


class SafetensorError(ErrorBase):
    """A file that breaks the format, or a call that is not valid."""

    __module__ = "stio.compat.safetensors"


class UnsupportedDtypeError(SafetensorError, TypeError):
    """The framework has no type for a tensor's dtype. numpy itself raises TypeError in that case."""


def require_plain(metadata: Mapping[str, object]) -> None:
    """Raise if the bytes of a file are not those of its tensors."""
    if why := why_packed(metadata):
        raise SafetensorError(f"Error while deserializing: {why}")


def wrong_type(argument: str, value: object, expected: str) -> TypeError:
    """Return the error for an argument of a wrong type."""
    return TypeError(f"argument '{argument}': '{type(value).__name__}' object is not an instance of '{expected}'")


def header_refused(error: StioError, *, what: str = "deserializing header") -> SafetensorError:
    """Return the error for a header that was refused, with the original's phrase, which programs compare."""
    if isinstance(error, TruncatedError) or error.message.startswith("bytes after the last tensor"):
        phrase = "incomplete metadata, file not fully covered"
    elif error.message.startswith("header: "):  # the scanner's
        phrase = "invalid JSON in header"
    elif isinstance(error, LimitError) and not error.message.endswith("the limit `max_rank`"):
        phrase = "header too large"
    else:
        phrase = "invalid shape, data type, or offset for tensor"
    return SafetensorError(f"Error while {what}: {phrase}: {error}")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn stio's errors inside the block into those of a read: `OSError` or `SafetensorError`."""
    try:
        yield
    except CheckpointNotFoundError as error:
        raise not_found(path) from error
    except StorageError as error:
        if error.errno == errno.ENOTDIR:
            raise not_found(path) from error
        raise OSError(error.errno or errno.EIO, error.message, path) from error
    except StioError as error:
        raise SafetensorError(str(error)) from error


def not_found(path: str) -> FileNotFoundError:
    """Return the error for a file that is not there."""
    error = FileNotFoundError(f"No such file or directory: {path}")
    error.errno = errno.ENOENT
    return error


@contextmanager
def saving() -> Iterator[None]:
    """Turn stio's errors inside the block into those of a write: `SafetensorError` for all."""
    try:
        yield
    except StorageError as error:
        reason = os.strerror(error.errno) if error.errno else "failed"
        raise SafetensorError(
            f"Error while serializing: I/O error: {reason} (os error {error.errno or 0}): {error}"
        ) from error
    except StioError as error:
        phrase = "header too large: " if isinstance(error, LimitError) else ""
        raise SafetensorError(f"Error while serializing: {phrase}{printable(str(error))}") from error
