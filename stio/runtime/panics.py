"""Panics: faults inside libraries that are written in Rust.

Their Python binding (pyo3) raises a `PanicException`, which derives from `BaseException`. It passes through every
`except Exception` and would end a task of a server without a line in its log. stio raises a `StorageError` instead.
"""

from __future__ import annotations

import errno

from stio.errors import StorageError, printable


class PanicError(StorageError):
    """A library has ended a call by a panic; the text is the library's own."""

    @property
    def cause(self) -> str:
        """The text of the library."""
        return str(self._details.get("cause", ""))


def without_panic(error: BaseException) -> BaseException:
    """Return an error that is an `Exception` for a panic; any other error unchanged.

    KeyboardInterrupt, SystemExit and the cancels of event loops are no panics.
    """
    if type(error).__name__ != "PanicException" or isinstance(error, Exception):
        return error
    cause = printable(str(error))
    return PanicError(
        f"a library that is written in Rust has failed inside (a panic); report it to its project: {cause}",
        errno=errno.EIO,
        cause=cause,
    )
