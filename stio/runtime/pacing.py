"""The length of one system call: long blocks are cut into pieces that take 0.04 to 0.25 s each.

A call that ends returns to Python, and beside a busy Python thread each return may wait one switch interval (5 ms) for
each thread that waits. So calls should be long. A cancel takes effect between two calls, and must within a second, so
they should not be too long either. The speed of the storage is not known in advance: each piece is timed, and its time
sets the length of the next one. The time contains the wait for the interpreter, and for a processor. If a piece were
cut because of these, the next ones would wait more often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

_LEAST_SECONDS = 0.04
_MOST_SECONDS = 0.25
_SMALLEST_PIECE_BYTES = 1 << 20


@dataclass
class Pacer:
    """Cuts a block into pieces.

    One pacer serves one file: what one worker measures sets the piece size of the other workers.
    """

    piece_bytes: int = 32 << 20
    """Size of the next piece."""

    def pieces(self, nbytes: int, stopped: Callable[[], bool]) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of each piece until all bytes are covered or `stopped()`; measures the time of each."""
        at = 0
        while at < nbytes and not stopped():
            step = min(self.piece_bytes, nbytes - at)
            if nbytes - at - step < _SMALLEST_PIECE_BYTES:
                step = nbytes - at  # a small rest joins the last piece
            begin = perf_counter()
            yield at, step
            self._adapt(step, perf_counter() - begin)
            at += step

    def _adapt(self, nbytes: int, seconds: float) -> None:
        if nbytes >= self.piece_bytes and seconds < _LEAST_SECONDS:
            self.piece_bytes *= 2
        elif seconds > _MOST_SECONDS and self.piece_bytes > _SMALLEST_PIECE_BYTES:
            self.piece_bytes = max(_SMALLEST_PIECE_BYTES, self.piece_bytes // 2)
