"""Bounds that the caller gives: which values they may have."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from stio.limits import Limits


@pytest.mark.parametrize("name", [one.name for one in fields(Limits)])
@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ("x", (TypeError, ValueError), "(takes a whole number, not 'x'|: 'x' is no size)"),
        (1.0, TypeError, "takes a whole number, not 1.0"),
        (True, TypeError, "takes a whole number, not True"),
        (None, TypeError, "takes a whole number, not None"),
        (-1, ValueError, "must not be negative, not -1"),
    ],
)
def test_a_bound_is_a_whole_number(name: str, value: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=f"^{name}:? ?{match}"):
        Limits(**{name: value})
    assert getattr(Limits(**{name: 0}), name) == 0
