"""Names of the leaves of a nested state: as tensors in a file, and in messages.

A tensor's name is its path, `state/0/exp_avg`. No two paths have the same name. Text is escaped where it has a
separator or a percent sign, where it is not printable, and where it would be read as a key of another type (`"0"`
beside `0`). An escape is a percent sign and two hexadecimal digits for each byte of UTF-8; any decoder can undo it.
"""

from __future__ import annotations

import re
from functools import lru_cache

from stio.errors import printable

_PLAIN = re.compile(r"(?!(?:True|False|None|nan|inf|__metadata__)\Z)[A-Za-z_][A-Za-z0-9_.\-]*")
_TYPED = re.compile(r"-?[0-9][0-9.e+-]*|-?inf|nan|True|False|None|\(.*|__metadata__", re.DOTALL)
_SEPARATORS = frozenset("/%")
_SEPARATORS_IN_TUPLES = frozenset("/%,()")


def key_label(key: object) -> str:
    """Return the part of a name that represents a key or an index; never empty, and without a slash.

    Args:
        key: Text, int, float, bool, None or a tuple of those.
    """
    return _text_label(key) if isinstance(key, str) else _typed_label(key)


@lru_cache(maxsize=1024)
def _text_label(key: str) -> str:
    return key if _PLAIN.fullmatch(key) else _escaped(key, _SEPARATORS)


def _typed_label(key: object) -> str:
    if isinstance(key, tuple):
        return f"({','.join(map(_label_in_tuple, key))})"
    return str(key)


def _label_in_tuple(key: object) -> str:
    return _escaped(key, _SEPARATORS_IN_TUPLES) if isinstance(key, str) else _typed_label(key)


def _escaped(text: str, separators: frozenset[str]) -> str:
    if not text:
        return "%"
    label = "".join(c if c.isprintable() and c not in separators else _percent(c) for c in text)
    return _percent(text[0]) + label[1:] if _TYPED.fullmatch(text) and label[0] != "%" else label


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def python_path(keys: list[object]) -> str:
    """Return a path in Python's syntax, for messages: `state['param_groups'][0]['lr']`."""
    return "state" + "".join(f"[{printable(repr(key))}]" for key in keys)
