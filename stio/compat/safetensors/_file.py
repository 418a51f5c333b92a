"""One open file: its checked header, and its bytes as regions of memory.

`mmap` maps the whole file privately; the mapping needs no descriptor and lives as long as an array over it. `pread`
keeps the descriptor, for as long as the file or a slice of it is held, and reads exactly what is asked for. So does
what loads to an accelerator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from stio.compat.safetensors._errors import SafetensorError, header_refused, not_found, reading
from stio.errors import StioError
from stio.format.header import PREFIX_BYTES, Header, header_nbytes, parse_header
from stio.runtime import memory
from stio.runtime.limits import HUGE_PAGE_BYTES
from stio.runtime.memory import Region
from stio.storage.local import LocalFile, open_file
from stio.storage.mapped import MappedFile

__all__ = ["Backend", "File", "copied", "header_of"]

Backend = Literal["mmap", "pread"]

_FIRST_READ_BYTES = 16 << 10
"""Holds the headers of some hundred tensors. Fresh memory is slow, so no more than that at once."""


def fresh(nbytes: int) -> Region:
    """Return memory that nobody else uses, its content undefined.

    What fills no huge page comes from the heap: that memory was mostly touched before (1 MiB read in 0.2 ms, 0.5 into
    fresh pages), and a mapping for each of 70,000 tensors is more than a process may have.
    """
    if nbytes >= HUGE_PAGE_BYTES:
        return memory.allocate(nbytes)
    heap: Any = np.empty(max(nbytes, 1), np.uint8)  # untyped: mypy sees no buffer in an array before 3.12
    buffer = (ctypes.c_char * max(nbytes, 1)).from_buffer(heap)
    return Region(ctypes.addressof(buffer), nbytes, buffer)


def copied(data: bytes | bytearray | memoryview) -> Region:
    """Return a copy of bytes, in memory of its own."""
    region = fresh(len(data))
    if len(data):
        ctypes.memmove(region.address, np.frombuffer(data, np.uint8).ctypes.data, len(data))
    return region


class _MetadataOnly(msgspec.Struct):
    """The part of a header that tells an empty map from none."""

    text: dict[str, str] | None = msgspec.field(default=None, name="__metadata__")


def _metadata_of(header: Header, raw: bytes) -> dict[str, str] | None:
    """Return the text metadata: None where the file has none, an empty map where it has an empty one."""
    if header.metadata or not (b"__metadata__" in raw or b"\\u" in raw):
        return dict(header.metadata) or None
    return msgspec.json.decode(raw, type=_MetadataOnly).text


def header_of(prefix: bytes, *, file_bytes: int, path: str, what: str) -> int:
    """Return the length of a header's JSON, in the words that the original has for what may be wrong with it.

    Raises:
        SafetensorError: The file is too short, or the length cannot be.
    """
    try:
        return header_nbytes(prefix, file_bytes=file_bytes, path=path)
    except StioError as error:
        if len(prefix) < PREFIX_BYTES:
            phrase = "header too small"
        elif int.from_bytes(prefix[:PREFIX_BYTES], "little") > 100_000_000:
            phrase = "header too large"
        else:
            phrase = "invalid header length"
        raise SafetensorError(f"Error while {what}: {phrase}: {error}") from error


class File:
    """An open file, its header read.

    Args:
        path: Where it is.
        backend: How bytes become memory.
        keep_open: Keep the descriptor of a mapped file too, for `source`.

    Raises:
        FileNotFoundError: It does not exist.
        OSError: The system refuses (`PermissionError`, `IsADirectoryError`).
        SafetensorError: It breaks the format.
    """

    def __init__(self, path: str, backend: Backend, *, keep_open: bool = False) -> None:
        self.path = path
        self._file: LocalFile | None = None
        if "\0" in path:
            raise not_found(path)
        with reading(path):
            file = open_file(path)
        self._file = file
        try:
            self.header, self.metadata = self._parse(file)
            self._mapped: Region | None = None
            if backend == "mmap":
                with reading(path):
                    self._mapped = MappedFile(file, lazy=True).region
        finally:
            if (backend == "mmap" and not keep_open) or not hasattr(self, "header"):
                self.close()

    def _parse(self, file: LocalFile) -> tuple[Header, dict[str, str] | None]:
        nbytes = file.identity.nbytes
        with reading(self.path):
            raw = _read(file, 0, min(nbytes, _FIRST_READ_BYTES))
        length = header_of(raw[:PREFIX_BYTES], file_bytes=nbytes, path=self.path, what="deserializing header")
        end = PREFIX_BYTES + length
        if end > len(raw):
            with reading(self.path):
                raw += _read(file, len(raw), end - len(raw))
        text = raw[PREFIX_BYTES:end]
        try:
            header = parse_header(text, file_bytes=nbytes, path=self.path, shard=self.path)
        except StioError as error:
            raise header_refused(error) from error
        return header, _metadata_of(header, text)

    @property
    def is_mapped(self) -> bool:
        """Whether regions are pieces of one mapping."""
        return self._mapped is not None

    @property
    def source(self) -> LocalFile:
        """The open file.

        Raises:
            SafetensorError: It was closed, or not kept open.
        """
        if self._file is None:
            raise SafetensorError("File is closed")
        return self._file

    def region(self, begin: int, nbytes: int) -> Region:
        """Return the bytes `[begin, begin + nbytes)` of the data: of the mapping, or read into fresh memory."""
        start = self.header.data_start + begin
        if self._mapped is not None:
            return self._mapped.sub(start, nbytes)
        region = fresh(nbytes)
        self._read_into(start, [region])
        return region

    def gather(self, begin: int, starts: Sequence[int], chunk_bytes: int) -> Region:
        """Return chunks of one tensor, read one behind the other into fresh memory (`pread` only).

        Args:
            begin: First byte of the tensor in the data.
            starts: First byte of each chunk in the tensor, ascending.
            chunk_bytes: Length of each.
        """
        region = fresh(len(starts) * chunk_bytes)
        first = self.header.data_start + begin
        for k, start in enumerate(starts):
            self._read_into(first + start, [region.sub(k * chunk_bytes, chunk_bytes)])
        return region

    def _read_into(self, offset: int, regions: list[Region]) -> None:
        file = self.source
        with reading(self.path):
            file.read_into(offset, regions)

    def close(self) -> None:
        """Give the descriptor back; a mapping stays with its arrays. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __del__(self) -> None:
        self.close()


def _read(file: LocalFile, offset: int, nbytes: int) -> bytes:
    region = fresh(nbytes)
    file.read_into(offset, [region])
    return region.tobytes()
