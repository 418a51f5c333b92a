"""Log lines of stio. A handler of the user's that raises must not change the outcome of a load or a save."""

from __future__ import annotations

import logging
from contextlib import suppress

_logger = logging.getLogger("stio")


def log(level: int, message: str, *values: object) -> None:
    """Log one line under "stio"; errors of filters and handlers are ignored.

    Args:
        level: A level of `logging`.
        message: The line, with `%` placeholders.
        values: Values of the placeholders.
    """
    with suppress(Exception):
        _logger.log(level, message, *values, stacklevel=2)
