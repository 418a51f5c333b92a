"""What tests of the command line share."""

from __future__ import annotations

import pytest
from crash.zygote import Zygote


@pytest.fixture
def program(program_zygote: Zygote) -> list[str]:
    """Return the program `stio`, without torch until a command needs it."""
    return program_zygote.program
