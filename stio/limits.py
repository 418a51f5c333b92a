"""Bounds and sizes that the whole package uses: limits for untrusted files, the default budget, sizes as text.

A limit is checked before memory is allocated, so a wrong number in a file costs an error and no memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import SupportsIndex, TypeAlias

from stio.errors import LimitError, printable

Size: TypeAlias = int | str
"""A size: a number of bytes, or text such as `"5GB"` or `"512MiB"`; see `parse_size`."""

DEFAULT_BUDGET_BYTES = 512 << 20
"""Memory that a load, a save or a conversion may use for bytes under way, unless `budget_bytes` is given."""

ACCELERATOR_BUDGET_BYTES = 256 << 20
"""Default budget of a load to an accelerator: for groups that a stream, or a load into a module, has under way. What is
on its way to the device is in the engine's ring."""

PAGE_BYTES = 4096
"""Alignment of direct reads and writes. Machines with larger base pages accept multiples of 4096 too."""

HUGE_PAGE_BYTES = 2 << 20
"""Size of a transparent huge page where stio requests them."""


_UNITS = {
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
_SHOWN = 40
"""Most characters of a wrong size in a message."""


@dataclass(frozen=True, slots=True, init=False)
class Limits:
    """Bounds on what an untrusted file may request, checked before anything is allocated.

    Raises:
        TypeError: A bound is no whole number.
        ValueError: A bound is negative.
    """

    header_bytes: int
    """Largest header: a number of bytes, or text such as `"200MB"`. The default is the limit of the format itself."""
    max_tensors: int
    """Most tensors in one file."""
    max_rank: int
    """Most dimensions of one tensor (the limit of torch)."""
    state_bytes: int
    """Longest description of the tree of a nested state, in bytes of text; see `header_bytes`."""
    max_state_nodes: int
    """Most values (containers, keys and leaves) of a nested state."""

    def __init__(
        self,
        *,
        header_bytes: Size = 100_000_000,
        max_tensors: int = 1_000_000,
        max_rank: int = 64,
        state_bytes: Size = 100_000_000,
        max_state_nodes: int = 4_000_000,
    ) -> None:
        values = (header_bytes, max_tensors, max_rank, state_bytes, max_state_nodes)
        for field, value in zip(fields(self), values, strict=True):
            if isinstance(value, str) and field.name.endswith("_bytes"):
                value = checked_size(value, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{field.name} takes a whole number, not {value!r}")
            if value < 0:
                raise ValueError(f"{field.name} must not be negative, not {printable(value)}")
            object.__setattr__(self, field.name, value)


def advice_on_limit(field: str) -> str:
    """Return what to do about a file that exceeds a limit of the caller's: a clause for the end of a message."""
    return f"; if you trust the file, pass limits=stio.Limits({field}=...) with a higher limit"


def limit_error(
    what: str, field: str, limit: int, *, path: str, offset: int | None = None, found: object = None
) -> LimitError:
    """Return the error for a file of which `what` is beyond the limit of this field."""
    message = f"{what} the limit `{field}`{advice_on_limit(field)}"
    unit = " bytes" if field.endswith("_bytes") else ""
    return LimitError(message, path=path, offset=offset, expected=f"at most {limit:,}{unit}", found=found)


def parse_size(size: Size) -> int:
    """Return a size in bytes.

    Args:
        size: A number of bytes, or text: digits alone, or a number and a unit, in any case. TB, GB, MB and KB are
            powers of ten, as on the hub; TiB, GiB, MiB and KiB powers of two.

    Raises:
        TypeError: Neither an integer nor text.
        ValueError: No such unit, no number, or not a positive, finite size.
    """
    if isinstance(size, str):
        lowered = size.strip().lower()
        unit = next((unit for unit in _UNITS if lowered.endswith(unit)), "")
        number = lowered.removesuffix(unit)
        try:
            nbytes = int(float(number) * _UNITS[unit]) if unit else int(number)
        except (ValueError, OverflowError):  # OverflowError: infinite
            raise ValueError(
                f"{size[:_SHOWN]!r} is no size; give a number of bytes, or a number and KB, MB, GB, TB, KiB, MiB, "
                "GiB or TiB"
            ) from None
    elif isinstance(size, bool) or not isinstance(size, SupportsIndex):
        raise TypeError(f"a size is a number of bytes, or text such as '2GB', not {printable(size)}")
    else:
        nbytes = operator.index(size)
    if nbytes <= 0:
        raise ValueError(f"a size must be positive, not {printable(size)}")
    return nbytes


def checked_size(size: Size, keyword: str = "budget_bytes") -> int:
    """Return a size in bytes, which a keyword takes.

    Raises:
        TypeError: It is neither a whole number nor text.
        ValueError: It is not positive, or a text that is no size.
    """
    try:
        return parse_size(size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{keyword}: {error}") from None
