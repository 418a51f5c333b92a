"""One open file: its checked header, its bytes as regions of memory, and the tensors that a framework makes of them.

The errors are the original's single class and what `open` would raise: a malformed file or a wrong call is a
`SafetensorError` with the original's phrase, then stio's details. If the operating system refuses a read, the error is
an `OSError`.

`mmap` maps the whole file privately; the mapping exists as long as an array over it. `pread` reads exactly the
requested bytes into memory of their own. A file that the system does not map is read so too.

A slice of torch over a mapping takes what torch takes. `checked` checks the index of the others as the original does.
That takes ints, slices, one Ellipsis and `[]`. An int or a stop past the end is an error there, although numpy would
cut the stop; the original's own tests hold it to that. Negative bounds, empty ranges and, for numpy, negative steps are
errors in the original; here they give numpy's result.
"""

from __future__ import annotations

import ctypes
import errno
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from stio.errors import CheckpointNotFoundError, LimitError, StioError, StorageError, TruncatedError, printable
from stio.format import PREFIX_BYTES, Header, Selection, header_nbytes, parse_header
from stio.format.files import kind_of, why_packed
from stio.limits import HUGE_PAGE_BYTES
from stio.process import contextmanager
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.storage import LocalFile, open_at


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


Backend = Literal["mmap", "pread"]

_FIRST_READ_BYTES = 16 << 10
"""Length of the first read: the header of some hundred tensors. More would be slow, because fresh memory is slow."""

_GROUP_BYTES = 8 << 20
"""Most bytes of consecutive tensors that one call reads, into one region of memory."""


def fresh(nbytes: int) -> Region:
    """Return fresh memory; its content is undefined.

    A region smaller than a huge page is allocated on the heap: that memory was mostly touched before (1 MiB read in
    0.2 ms, 0.5 into fresh pages), and a mapping for each of 70,000 tensors is more than a process may have.
    """
    if nbytes >= HUGE_PAGE_BYTES:
        return memory.allocate(nbytes)
    heap: Any = np.empty(max(nbytes, 1), np.uint8)  # untyped: mypy sees no buffer in an array before 3.12
    buffer = (ctypes.c_char * max(nbytes, 1)).from_buffer(heap)
    return Region(ctypes.addressof(buffer), nbytes, buffer)


def header_of(read: Callable[[int, int], bytes], *, file_bytes: int, path: str, what: str) -> Header:
    """Return the checked header of a file.

    Args:
        read: Returns the file's bytes `[begin, end)`.
        file_bytes: Size of the file.
        path: File to name in errors.
        what: What fails, for messages, in the words of the original.

    Raises:
        SafetensorError: The file breaks the format; the message has the original's phrase for it.
    """
    prefix = read(0, min(PREFIX_BYTES, file_bytes))
    try:
        nbytes = header_nbytes(prefix, file_bytes=file_bytes, path=path)
    except StioError as error:
        phrase = "header too large" if isinstance(error, LimitError) else "invalid header length"
        if len(prefix) < PREFIX_BYTES:
            phrase = "header too small"
        kind = kind_of(read, file_bytes, path)
        reason = str(error) if kind is None else f"{printable(path)}: {kind.refusal(path)}"
        raise SafetensorError(f"Error while {what}: {phrase}: {reason}") from error
    try:
        return parse_header(read(PREFIX_BYTES, PREFIX_BYTES + nbytes), file_bytes=file_bytes, path=path, shard=path)
    except StioError as error:
        if isinstance(error, TruncatedError) or error.message.startswith("bytes after the last tensor"):
            phrase = "incomplete metadata, file not fully covered"
        elif error.message.startswith("header: "):  # the scanner's
            phrase = "invalid JSON in header"
        elif isinstance(error, LimitError) and "`max_rank`" not in error.message:
            phrase = "header too large"
        else:
            phrase = "invalid shape, data type, or offset for tensor"
        raise SafetensorError(f"Error while {what}: {phrase}: {error}") from error


class Framework(ABC):
    """Makes a framework's tensors from a file's bytes."""

    @abstractmethod
    def make(self, region: Region, header: Header, rows: slice) -> dict[str, Any]:
        """Return consecutive tensors of a file by name.

        Args:
            region: Memory that holds their bytes, from the first byte of the first one on; the tensors keep it alive.
            header: The file's header.
            rows: Their rows in it.
        """

    @abstractmethod
    def make_part(self, file: DropInFile, row: int, index: Any) -> Any:
        """Return `tensor[index]` of one tensor of a file; only the bytes of that part are read."""

    def make_all(self, file: DropInFile) -> dict[str, Any]:
        """Return all tensors of a file by name, in the order of their data."""
        header = file.header
        tensors: dict[str, Any] = {}
        for rows in [slice(0, len(header))] if file.is_mapped else _groups(header.begins, header.ends):
            tensors |= self.make(file.region_of(rows), header, rows)
        return tensors


def offsets_in(header: Header, rows: slice) -> list[int]:
    """Return the first byte of each of consecutive tensors, relative to that of the first one."""
    begins = header.begins[rows]
    return [begin - begins[0] for begin in begins] if begins and begins[0] else begins


def _groups(begins: Sequence[int], ends: Sequence[int]) -> Iterator[slice]:
    """Yield runs of consecutive tensors that are read together; a large tensor is a run of its own."""
    first = 0
    for row in range(len(begins)):
        if row > first and ends[row] - begins[first] > _GROUP_BYTES:
            yield slice(first, row)
            first = row
    if first < len(begins):
        yield slice(first, len(begins))


class DropInFile:
    """An open file with its header.

    Args:
        path: The file.
        backend: `mmap` or `pread`; see the module.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: The system refuses (`PermissionError`, `IsADirectoryError`).
        SafetensorError: The file breaks the format, or is one of a delta, whose tensors are no weights.
    """

    def __init__(self, path: str, backend: Backend) -> None:
        self.path = path
        if "\0" in path:
            raise not_found(path)
        with reading(path):
            self.file = LocalFile.open(path)
        """Open as long as this object or a slice of it is referenced."""
        try:
            nbytes = self.file.identity.nbytes
            first = self._read(0, min(nbytes, _FIRST_READ_BYTES))
            self.header = header_of(
                lambda begin, end: first[begin:end] if end <= len(first) else self._read(begin, end),
                file_bytes=nbytes,
                path=path,
                what="deserializing header",
            )
            require_plain({"format": self.header.metadata.get("format", "")})  # the patched `get_tensor` unpacks others
            mapped = self.file.map(lazy=True) if backend == "mmap" else None
        except BaseException:
            self.file.close()
            raise
        self._mapped = None if mapped is None else mapped.region

    @property
    def is_mapped(self) -> bool:
        """Whether regions are ranges of one mapping."""
        return self._mapped is not None

    def opened_again(self) -> LocalFile:
        """Return the file once more, for a load that outlives this object; the caller closes it.

        Raises:
            OSError: The system refuses, or the file was changed since it was opened.
        """
        with reading(self.path):
            self.file.check_unchanged()
            return open_at(f"/proc/self/fd/{self.file.fd}", self.path, None)

    def region_of(self, rows: slice) -> Region:
        """Return the bytes of the tensors of consecutive rows; see `region`."""
        begin = self.header.begins[rows.start] if rows.start < rows.stop else 0
        return self.region(begin, self.header.ends[rows.stop - 1] - begin if rows.start < rows.stop else 0)

    def region(self, begin: int, nbytes: int) -> Region:
        """Return the bytes `[begin, begin + nbytes)` of the data: a range of the mapping, or read into fresh memory."""
        start = self.header.data_start + begin
        if self._mapped is not None:
            return self._mapped.sub(start, nbytes)
        region = fresh(nbytes)
        self._read_into(start, region)
        return region

    def gather(self, row: int, selection: Selection) -> Region:
        """Return the selected chunks of one tensor, read one after the other into fresh memory (`pread` only)."""
        starts, nbytes = selection.starts, selection.chunk_bytes
        region = fresh(len(starts) * nbytes)
        first = self.header.data_start + self.header.begins[row]
        for k, start in enumerate(starts):
            self._read_into(first + start, region.sub(k * nbytes, nbytes))
        return region

    def _read(self, begin: int, end: int) -> bytes:
        region = fresh(end - begin)
        self._read_into(begin, region)
        return region.tobytes()

    def _read_into(self, offset: int, region: Region) -> None:
        with reading(self.path):
            self.file.read_into(offset, [region])

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


def checked(index: Any, shape: Sequence[int], *, negative_steps: bool) -> tuple[int | slice, ...]:
    """Return the index as one int or slice for each of its dimensions, all of them in range.

    Args:
        index: The index as given in the brackets.
        shape: Dimensions of the tensor.
        negative_steps: Whether slices may have negative steps.

    Raises:
        SafetensorError: The index is of a kind that is not supported, or out of range.
    """
    if isinstance(index, list):
        if index:
            raise SafetensorError("Non empty lists are not implemented")
        index = slice(0, 0)
    items = list(index) if isinstance(index, tuple) else [index]
    num_ellipses = sum(item is Ellipsis for item in items)
    if num_ellipses > 1:
        raise SafetensorError("Only one ellipsis (...) is allowed in slice index")
    if num_ellipses:
        place = next(k for k, item in enumerate(items) if item is Ellipsis)
        items[place : place + 1] = [slice(None)] * max(0, len(shape) - len(items) + 1)
    terms = [_term(item, dim, shape, negative_steps) for dim, item in enumerate(items)]
    reason = "more slicing indexes than dimensions in tensor" if len(terms) > len(shape) else ""
    for dim, (term, size) in enumerate(zip(terms, shape, strict=False)):
        if not reason and (wrong := _past_the_end(term, size)) is not None:
            reason = f"index {wrong} out of bounds for tensor dimension #{dim} of size {size}"
    if reason:
        shown = ", ".join(map(_shown, terms))
        raise SafetensorError(f"Error during slicing [{shown}] with shape {list(shape)}: {reason}")
    return tuple(terms)


def _term(item: Any, dim: int, shape: Sequence[int], negative_steps: bool) -> int | slice:
    """Return one term of an index, with its bounds counted from the start."""
    size = shape[dim] if dim < len(shape) else 0
    if not isinstance(item, slice):
        try:
            number = operator.index(item)
        except TypeError:
            message = f"Unsupported slice index at position {dim}: expected slice, int, or ellipsis"
            raise SafetensorError(message) from None
        if number + size < 0:
            raise SafetensorError(f"Invalid index {number} for dimension {dim} of size {size}")
        return number if number >= 0 else number + size
    bounds = (item.start, item.stop, item.step)
    start, stop, step = (None if bound is None else operator.index(bound) for bound in bounds)
    if step is not None and (step == 0 or (step < 0 and not negative_steps)):
        raise SafetensorError(f"Slice step must be a positive integer, got {step}")
    if step is None or step > 0:
        start, stop = (bound if bound is None or bound >= 0 else max(0, bound + size) for bound in (start, stop))
    return slice(start, stop, step)


def _past_the_end(term: int | slice, size: int) -> int | None:
    """Return the first row past the end that a term selects, None if there is none."""
    if isinstance(term, int):
        return term if term >= size else None
    if (term.step is not None and term.step < 0) or term.stop is None or term.stop <= size:
        return None
    return term.start if term.start is not None and term.start >= size else int(term.stop) - 1


def _shown(term: int | slice) -> str:
    if isinstance(term, int):
        return str(term)
    start, stop = ("" if bound is None else str(bound) for bound in (term.start, term.stop))
    return f"{start}:{stop}" + ("" if term.step in (None, 1) else f":{term.step}")
