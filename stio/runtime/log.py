"""Log lines of stio. A handler of the user's that raises must not change the outcome of a load or a save."""

from __future__ import annotations

import logging
from contextlib import suppress

from stio.runtime import clock

_logger = logging.getLogger("stio")


def log(level: int, message: str, *values: object) -> None:
    """Log one line under "stio"; errors of filters and handlers are ignored.

    Args:
        level: A level of `logging`.
        message: The line, with `%` placeholders.
        values: Values of the placeholders. Of an error its text is logged: a handler may keep the record, and the error
            refers to the frames of callers.
    """
    with suppress(Exception):
        if _logger.isEnabledFor(level):
            texts = [str(value) if isinstance(value, BaseException) else value for value in values]
            _logger.log(level, message, *texts, stacklevel=2)


class RareWarnings:
    """Levels for failures that may come in large numbers: the first is a warning, then one after growing pauses."""

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._quiet_seconds = 5.0

    def level(self) -> int:
        """Return the level of a line that is logged now: WARNING, or INFO if there was a warning a short time ago."""
        now = clock.monotonic()
        if now < self._quiet_until:
            return logging.INFO
        self._quiet_until, self._quiet_seconds = now + self._quiet_seconds, 2 * self._quiet_seconds
        return logging.WARNING
