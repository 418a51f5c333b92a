"""Bringing a block's bytes to where its group wants them: from an open file, or by way of an image that is kept.

Reads are cut into pieces of about 20 ms. What is kept is read once, into its image, and copied from there; where a
block is one run of the file the image can be lent instead, so that a device copies out of it without a stop between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stio.loading.cache.file_image import CachedFile
from stio.loading.plan import GAP, Block, Group
from stio.runtime import memory
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region
from stio.runtime.pacing import Pacer
from stio.storage.base import Source

__all__ = ["CachedFileReader", "Reader", "reader"]


class Reader:
    """Brings a block's bytes from a source into the image of its group.

    Args:
        source: The open file.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._pacer = Pacer()
        self._trash: Region | None = None

    def read(self, group: Group, block: Block, target: Region, base: int, stopped: Callable[[], bool]) -> None:
        """Fill `target`, whose first byte is the image's byte `base`, with what the block brings."""
        if block.scatter:
            self.source.read_into(
                block.offset, [self._landing(target, at - base, length, at) for at, length in block.scatter]
            )
            return
        start, nbytes = block.at - base, block.nbytes
        if group.offset >= 0:
            # The page that a dense image's end shares with the next group is read whole: direct reads stay direct.
            whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            nbytes = max(nbytes, min(whole, target.nbytes - start, self.source.identity.nbytes - block.offset))
        for at, length in self._pacer.pieces(nbytes, stopped):
            self.source.read_into(block.offset + at, [target.sub(start + at, length)])

    def lend(self, block: Block, stopped: Callable[[], bool]) -> list[tuple[int, Region]] | None:
        """Return memory that holds a block's bytes, each piece with its place in the group's image; None: `read` them.

        It stays as it is until whoever keeps it is told that the load has ended.
        """
        return None

    def _landing(self, target: Region, start: int, length: int, at: int) -> Region:
        if at != GAP:
            return target.sub(start, length)
        if self._trash is None or self._trash.nbytes < length:
            self._trash = memory.allocate(max(length, 1 << 20))  # what lands here is never looked at: shared
        return self._trash.sub(0, length)


class CachedFileReader(Reader):
    """Brings blocks by way of the image of their file, or from the file where there is no memory for that.

    Args:
        source: The open file.
        kept: Its image, held until the load has ended.
    """

    def __init__(self, source: Source, kept: CachedFile) -> None:
        super().__init__(source)
        self._image = kept.image

    def read(self, group: Group, block: Block, target: Region, base: int, stopped: Callable[[], bool]) -> None:
        """Fill `target`, whose first byte is the image's byte `base`, with what the block brings."""
        if not self.bring(block, stopped):
            super().read(group, block, target, base, stopped)
            return
        for at, region in self._pieces(block):
            if stopped():
                return
            memory.copy(target.sub(at - base, region.nbytes), region)

    def lend(self, block: Block, stopped: Callable[[], bool]) -> list[tuple[int, Region]] | None:
        """Return where the image has a block's bytes; not of scattered ones: a copy for each costs more than one."""
        if block.scatter or not self.bring(block, stopped):
            return None
        return list(self._pieces(block))

    def bring(self, block: Block, stopped: Callable[[], bool]) -> bool:
        """Have a block's range of the file in the image; False if there is no memory for it.

        Raises:
            Cancelled: `stopped()` came first.
        """
        try:
            while claimed := self._image.claim(block.offset, block.offset + block.nbytes, stopped):
                self._fetch(claimed, stopped)
        except MemoryError:
            return False
        return True

    def _fetch(self, claimed: range, stopped: Callable[[], bool]) -> None:
        done = claimed.start
        try:
            for at, length in self._pacer.pieces(len(claimed), stopped):
                start = claimed.start + at
                self.source.read_into(start, self._image.regions(start, length))
                done = start + length
                self._image.landed(claimed.start, done)
        finally:
            self._image.give_up(done, claimed.stop)

    def _pieces(self, block: Block) -> Iterator[tuple[int, Region]]:
        position = block.offset
        for at, length in block.scatter or ((block.at, block.nbytes),):
            if at != GAP:
                for region in self._image.regions(position, length):
                    yield at, region
                    at += region.nbytes
            position += length


def reader(source: Source, kept: CachedFile | None) -> Reader:
    """Return what brings a file's blocks."""
    return Reader(source) if kept is None else CachedFileReader(source, kept)
