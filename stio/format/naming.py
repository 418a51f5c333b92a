"""What the files of a checkpoint are called: shards, index, manifest, and which old ones a new save replaces.

The names are the hub's, so that whoever reads its checkpoints reads these.
"""

from __future__ import annotations

import re
from string import Formatter

from stio.errors import printable
from stio.format.index import check_shard_name

__all__ = [
    "MANIFEST_SUFFIX",
    "check_pattern",
    "index_name",
    "is_checkpoint_file",
    "manifest_name",
    "shard_name",
]

MANIFEST_SUFFIX = ".manifest.json"
"""Follows the name of the single file, or of the index without its own `.index.json`."""

_FILE_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".index.json"

# Hexadecimal, and of this length: `model-finetuned-00001-of-00002` is somebody else's.
_SAVE_ID = "[0-9a-f]{8,32}"


def check_pattern(pattern: str) -> None:
    """Require that a pattern gives each shard a name of its own, in the checkpoint's directory, on every system.

    Args:
        pattern: Such as `model{suffix}.safetensors`.

    Raises:
        TypeError: Not text.
        ValueError: `{suffix}` is not in it exactly once, something else in braces is, it does not end in
            `.safetensors`, leads into another directory, or gives a name that some system reads otherwise.
    """
    before, after = _around_suffix(pattern)
    if not after.endswith(_FILE_SUFFIX):
        raise ValueError(f"the filename pattern must end in '{{suffix}}...{_FILE_SUFFIX}', not {printable(pattern)!r}")
    if any(character in pattern for character in "/\\\0"):
        raise ValueError(f"the filename pattern {printable(pattern)!r} must name files, without a directory or NUL")
    try:
        name = f"{before}{after}"
        name.encode()
        check_shard_name(name, path="filename_pattern")
    except ValueError as error:
        reason = getattr(error, "message", "it is no valid text")
        raise ValueError(f"the filename pattern {printable(pattern)!r} gives an unsafe name: {reason}") from None


def _around_suffix(pattern: str) -> tuple[str, str]:
    """Return the text before and after `{suffix}`."""
    if not isinstance(pattern, str):
        raise TypeError(f"a filename pattern is text, not {type(pattern).__name__}")
    wrong = f"the filename pattern must hold {{suffix}} once, and nothing else in braces, not {printable(pattern)!r}"
    before, after, found = "", "", 0
    try:
        for text, field, spec, conversion in Formatter().parse(pattern):
            before, after = (before, after + text) if found else (before + text, after)
            if field is not None:
                found += 1
                if field != "suffix" or spec or conversion:
                    raise ValueError(wrong)
    except ValueError:  # also an open brace
        raise ValueError(wrong) from None
    if found != 1:
        raise ValueError(f"{wrong}: the shards would overwrite each other" if not found else wrong)
    return before, after


def shard_name(pattern: str, k: int, n: int, *, save_id: str | None = None) -> str:
    """Return the name of a shard.

    Args:
        pattern: Such as `model{suffix}.safetensors`.
        k: Which shard, from 0. The name counts from 1.
        n: How many there are.
        save_id: Sets the shards of one save apart from those that stand beside them: 8 to 32 lower-case hexadecimal
            digits.

    Raises:
        ValueError: There is no such shard, or the save id is none.
    """
    if not 0 <= k < n:
        raise ValueError(f"there is no shard {k} of {n}; they count from 0")
    if save_id is not None and not re.fullmatch(_SAVE_ID, save_id):
        raise ValueError(f"a save id is 8 to 32 lower-case hexadecimal digits, not {printable(save_id)!r}")
    before, after = _around_suffix(pattern)
    if n == 1 and save_id is None:
        return before + after
    mark = "" if save_id is None else f"-{save_id}"
    return f"{before}{mark}-{k + 1:05d}-of-{n:05d}{after}"


def index_name(pattern: str) -> str:
    """Return the name of the index over the shards of a pattern."""
    return "".join(_around_suffix(pattern)) + _INDEX_SUFFIX


def manifest_name(pattern: str) -> str:
    """Return the name of the manifest of the files of a pattern."""
    return "".join(_around_suffix(pattern)) + MANIFEST_SUFFIX


def is_checkpoint_file(name: str, pattern: str) -> bool:
    """Return whether a file of this name belongs to a checkpoint that was saved with this pattern.

    The hub's rule for what an older checkpoint left (single file, shards, index), and stio's names with a save id.
    """
    before, after = map(re.escape, _around_suffix(pattern))
    rule = rf"{before}(?:(?:-{_SAVE_ID})?-[0-9]{{5,}}-of-[0-9]{{5,}})?{after}(?:{re.escape(_INDEX_SUFFIX)})?"
    return re.fullmatch(rule, name) is not None
