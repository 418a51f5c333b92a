"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

__all__ = ["Pacer"]


_PIECE_SECONDS = 0.02


_SMALLEST_PIECE_BYTES = 1 << 20


@dataclass
class Pacer:
    """Cuts a block into pieces of about 20 ms each.

    Longer calls return less often to Python, where each return may wait a switch interval; shorter ones let a
    cancel through sooner. One pacer serves a file, so what one worker learns of its speed helps the others.
    """

    piece_bytes: int = 32 << 20
    """What the next piece should measure."""

    def pieces(self, nbytes: int, stopped: Callable[[], bool]) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of pieces until all is covered or `stopped()`; times each piece."""
        at = 0
        while at < nbytes and not stopped():
            step = min(self.piece_bytes, nbytes - at)
            if nbytes - at - step < _SMALLEST_PIECE_BYTES:
                step = nbytes - at  # no crumbs
            begin = perf_counter()
            yield at, step
            self._learn(step, perf_counter() - begin)
            at += step

    def _learn(self, nbytes: int, seconds: float) -> None:
        if nbytes >= self.piece_bytes and seconds < _PIECE_SECONDS / 2:
            self.piece_bytes *= 2
        elif seconds > _PIECE_SECONDS * 4 and self.piece_bytes > _SMALLEST_PIECE_BYTES:
            self.piece_bytes = max(_SMALLEST_PIECE_BYTES, self.piece_bytes // 2)
