"""The states of the random generators of this process, as values that a nested state can hold.

They are those of Python, numpy, torch, and torch's CUDA devices. A training that is resumed needs them for dropout and
for the order of its data.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Return the states."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        # No states of unused devices: the query would initialize them.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states; those of CUDA devices that this process does not have are left out.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: They have another form.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    for device, one in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(one.cpu(), device)
