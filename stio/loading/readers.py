"""Reads a block's bytes into memory: from an open file, or through the cached image of that file.

Reads are cut into pieces (`stio.runtime.pacing`), so that a cancel takes effect between them. A cached file is read
once, into its image, and copied from there. A device can copy directly from the image if a block is one run of the
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stio.loading.cache.file_image import CachedFile
from stio.loading.plan import GAP, Block, Group
from stio.loading.sizes import BLOCK_BYTES
from stio.runtime import memory
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region
from stio.runtime.pacing import Pacer, Unpaced
from stio.storage.base import RequestedSource, Source


class BlockReader:
    """Reads blocks of a file into the memory of their groups.

    Args:
        source: The open file.
        piece_bytes: Length of the first piece; later ones depend on how long it took.
    """

    def __init__(self, source: Source, piece_bytes: int = BLOCK_BYTES) -> None:
        self.source = source
        self._pacer = Unpaced() if isinstance(source, RequestedSource) else Pacer(piece_bytes)
        self._discarded: Region | None = None

    def read(self, group: Group, block: Block, target: Region, base: int, stopped: Callable[[], bool]) -> None:
        """Fill `target`, which holds the group's bytes from `base` on, with the bytes of a block."""
        if block.scatter:
            self.source.read_into(
                block.offset, [self._target_of(target, at - base, length, at) for at, length in block.scatter]
            )
            return
        start, nbytes = block.at - base, block.nbytes
        if group.offset >= 0:
            # A dense group may end inside a page. The whole page is read, as direct I/O requires it.
            whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            nbytes = max(nbytes, min(whole, target.nbytes - start, self.source.identity.nbytes - block.offset))
        for at, length in self._pacer.pieces(nbytes, stopped):
            self.source.read_into(block.offset + at, [target.sub(start + at, length)])

    def cached_regions(self, block: Block, stopped: Callable[[], bool]) -> list[tuple[int, Region]] | None:
        """Return memory that holds a block's bytes, each region with its offset in the group; None: `read` them.

        The memory stays unchanged until the load releases the cached file.
        """
        return None

    def _target_of(self, target: Region, start: int, length: int, at: int) -> Region:
        if at != GAP:
            return target.sub(start, length)
        if self._discarded is None or self._discarded.nbytes < length:
            self._discarded = memory.allocate(max(length, 1 << 20))  # its content is not used, so all threads share it
        return self._discarded.sub(0, length)


class CachedBlockReader(BlockReader):
    """Reads blocks through the image of their file, or from the file if there is no memory for that.

    Args:
        source: The open file.
        cached: The file in the cache, held until the load has ended.
    """

    def __init__(self, source: Source, cached: CachedFile) -> None:
        super().__init__(source)
        self._image = cached.image

    def read(self, group: Group, block: Block, target: Region, base: int, stopped: Callable[[], bool]) -> None:
        """Fill `target`, which holds the group's bytes from `base` on, with the bytes of a block."""
        if not self.fill_image(block, stopped):
            super().read(group, block, target, base, stopped)
            return
        for at, region in self._regions(block):
            if stopped():
                return
            memory.copy(target.sub(at - base, region.nbytes), region)

    def cached_regions(self, block: Block, stopped: Callable[[], bool]) -> list[tuple[int, Region]] | None:
        """Return the image's memory of a block; None for a scattered block: one copy costs less than many."""
        if block.scatter or not self.fill_image(block, stopped):
            return None
        return list(self._regions(block))

    def fill_image(self, block: Block, stopped: Callable[[], bool]) -> bool:
        """Read the missing bytes of a block's range into the image; return False if there is no memory for them.

        Raises:
            Cancelled: `stopped()` came first.
        """
        try:
            while claimed := self._image.claim(block.offset, block.offset + block.nbytes, stopped):
                self._read_claimed(claimed, stopped)
        except MemoryError:
            return False
        return True

    def _read_claimed(self, claimed: range, stopped: Callable[[], bool]) -> None:
        done = claimed.start
        try:
            for at, length in self._pacer.pieces(len(claimed), stopped):
                start = claimed.start + at
                self.source.read_into(start, self._image.regions(start, length))
                done = start + length
                self._image.mark_present(claimed.start, done)
        finally:
            self._image.mark_missing(done, claimed.stop)

    def _regions(self, block: Block) -> Iterator[tuple[int, Region]]:
        position = block.offset
        for at, length in block.scatter or ((block.at, block.nbytes),):
            if at != GAP:
                for region in self._image.regions(position, length):
                    yield at, region
                    at += region.nbytes
            position += length


def block_reader(source: Source, cached: CachedFile | None, piece_bytes: int = BLOCK_BYTES) -> BlockReader:
    """Return the reader of a file's blocks."""
    return BlockReader(source, piece_bytes) if cached is None else CachedBlockReader(source, cached)
