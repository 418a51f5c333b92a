"""A plugin of SGLang: its loaders of weights read safetensors by stio.

    SGLANG_PLUGINS=stio python -m sglang.launch_server --model-path MODEL

SGLang has no registry of load formats. Its loaders call `safetensors.safe_open` and `safetensors.torch.load`, in each
of its processes. SGLang calls plugins in each of them too, so this one calls `stio.compat.install`.
"""

from __future__ import annotations

import os

from stio.compat import install

__all__ = ["register"]

_VARIABLE = "SGLANG_PLUGINS"
_NAME = "stio"


def register() -> None:
    """Put stio in the place of safetensors, if the variable `SGLANG_PLUGINS` names it. SGLang calls this.

    SGLang calls all plugins that are installed when the variable is not set. Nothing happens then: stio may be
    installed for another purpose.

    Raises:
        ImportError: The package safetensors is not installed.
        RuntimeError: Its release is not supported; see `stio.compat.install`. SGLang logs it and loads without stio.
    """
    if _NAME in (name.strip() for name in os.environ.get(_VARIABLE, "").split(",")):
        install()
