"""The contract of storages, as a class of tests to inherit from. Public; it needs pytest.

A test class for a storage of your own inherits from `SourceContract`: reads at any offset and into many regions, files
that shrink or change, reads on many threads at once. Nothing in stio imports this module.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stio.errors import ChangedDuringReadError, TruncatedError
from stio.limits import PAGE_BYTES
from stio.runtime import memory
from stio.storage import Source

__all__ = ["SourceContract"]

_GUARD = b"\xcb" * 64
_NUM_THREADS = 8


def read_guarded(source: Source, offset: int, *lengths: int) -> bytes:
    """Read into one region for each length; fail if a byte beside the regions is changed."""
    buffer = memory.allocate(sum(lengths) + len(_GUARD) * (len(lengths) + 1))
    buffer.write(0, _GUARD[:1] * buffer.nbytes)
    regions, at = [], len(_GUARD)
    for length in lengths:
        regions.append(buffer.sub(at, length))
        at += length + len(_GUARD)
    try:
        source.read_into(offset, regions)
    finally:
        after, at = buffer.tobytes(), 0
        for length in lengths:
            assert after[at : at + len(_GUARD)] == _GUARD, "bytes beside the regions were changed"
            at += len(_GUARD) + length
        assert after[at : at + len(_GUARD)] == _GUARD, "bytes beside the regions were changed"
    return b"".join(region.tobytes() for region in regions)


class SourceContract:
    """The tests that every storage must pass. Inherit from it as `Test...`, and define how a file is opened.

    A storage without paths overrides `create` and `overwrite` instead of `open`.
    """

    DATA = random.Random(7).randbytes(3 * PAGE_BYTES + 577)
    """Content of the file; its length is no multiple of a page or a sector."""

    file: Path

    def open(self, path: Path) -> Source:
        """Return the source for a file."""
        raise NotImplementedError

    def create(self, directory: Path, data: bytes) -> Source:
        """Return a source with the content `data`."""
        self.file = directory / "contract.bin"
        self.file.write_bytes(data)
        return self.open(self.file)

    def overwrite(self, data: bytes) -> None:
        """Replace, in place, the bytes of the source that `create` returned."""
        before = self.file.stat()
        self.file.write_bytes(data)
        # The clock of a filesystem may show the same time for two writes of a test.
        os.utime(self.file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))

    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[Source]:
        """Open a source of `DATA`."""
        source = self.create(tmp_path, self.DATA)
        yield source
        source.close()

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(0, 1), (0, 8), (0, 4096), (8, 4096), (1, 4095), (4095, 2), (4096, 4096), (4096, 8192), (5000, 3000)],
    )
    def test_reads_at_offsets(self, source: Source, offset: int, nbytes: int) -> None:
        """Any offset and length gives the bytes of the file, and changes nothing beside them."""
        assert read_guarded(source, offset, nbytes) == self.DATA[offset : offset + nbytes]

    def test_reads_everything(self, source: Source) -> None:
        """The last byte can be read, alone too."""
        assert read_guarded(source, 0, len(self.DATA)) == self.DATA
        assert read_guarded(source, len(self.DATA) - 1, 1) == self.DATA[-1:]

    def test_fills_regions_in_order(self, source: Source) -> None:
        """One read fills many regions, more than one system call accepts."""
        assert read_guarded(source, 100, 1, 2, 3, 4000, 5) == self.DATA[100:4111]
        assert read_guarded(source, 3, *[3] * 3000) == self.DATA[3:9003]

    def test_takes_empty_regions(self, source: Source) -> None:
        """Empty regions are allowed everywhere: alone, and at the end of the file too."""
        assert read_guarded(source, 7, 0, 5, 0, 0, 6, 0) == self.DATA[7:18]
        assert read_guarded(source, 7, 0) == b""
        assert read_guarded(source, len(self.DATA), 0, 0) == b""
        source.read_into(0, [])

    @pytest.mark.parametrize("lengths", [(10,), (4096,), (2, 8), (3, 0, 5000)])
    def test_c90_past_the_end(self, source: Source, lengths: tuple[int, ...]) -> None:
        """The error names the end of the file."""
        with pytest.raises(TruncatedError) as caught:
            read_guarded(source, len(self.DATA) - 3, *lengths)
        assert caught.value.offset == len(self.DATA)
        assert caught.value.path == source.path
        with pytest.raises(TruncatedError):
            read_guarded(source, len(self.DATA) + 100, 1)

    def test_c90_shrunk_file(self, source: Source) -> None:
        """The remaining bytes can be read. A read past them is an error and returns no old bytes."""
        self.overwrite(self.DATA[:5000])
        assert read_guarded(source, 0, 5000) == self.DATA[:5000]
        with pytest.raises(TruncatedError) as caught:
            read_guarded(source, 4990, 100)
        assert caught.value.offset == 5000

    def test_identity(self, source: Source) -> None:
        """The identity has the size, and stays that of the file when it was opened."""
        identity = source.identity
        assert identity.nbytes == len(self.DATA)
        self.overwrite(self.DATA + b"more")
        assert source.identity == identity

    def test_unchanged_file(self, source: Source) -> None:
        """A read is no change."""
        read_guarded(source, 0, len(self.DATA))
        source.check_unchanged()

    @pytest.mark.parametrize("change", ["rewritten", "appended", "cut"])
    def test_c91_changed_file(self, source: Source, change: str) -> None:
        """A rewrite of the same length, an append and a truncation are all detected."""
        data = {"rewritten": self.DATA[::-1], "appended": self.DATA + b"x", "cut": self.DATA[:-1]}[change]
        self.overwrite(data)
        with pytest.raises(ChangedDuringReadError) as caught:
            source.check_unchanged()
        assert caught.value.path == source.path
        assert caught.value.expected == str(source.identity)

    def test_close_is_idempotent(self, tmp_path: Path) -> None:
        """A second close does nothing."""
        source = self.create(tmp_path, self.DATA)
        source.close()
        source.close()

    def test_concurrent_reads(self, source: Source) -> None:
        """Reads on many threads at once each return their own bytes."""

        def read_some(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(25):
                offset = chance.randrange(len(self.DATA))
                first = chance.randint(0, (len(self.DATA) - offset) // 2)
                second = chance.randint(0, len(self.DATA) - offset - first)
                assert read_guarded(source, offset, first, second) == self.DATA[offset : offset + first + second]

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(read_some, range(_NUM_THREADS)))
