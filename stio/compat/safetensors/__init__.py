"""The names of the `safetensors` package, implemented by stio: change the import and keep the code.

Reading runs in the caller's thread. It maps the file and copies nothing, or reads the requested bytes only
(`backend="pread"`). Saving is atomic and durable. Intended differences are described at each function.

`_open` has `safe_open`; `_file` has the open file and the base class of a framework; `_arrays`
(numpy), `_tensors` (torch) and `_accelerator` (torch on a device) are the frameworks. `_prefetch` reads declared
tensors in the background, `_specs` and `_serialize` have raw tensors without torch, `torch` the saves and shared
memory, `_errors` the original's errors, `_installed` the objects of `stio.compat.install`. `numpy` works without torch,
and only a load to a device and a prefetch import stio's loads.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stio.compat.safetensors._errors import SafetensorError
from stio.compat.safetensors._open import PySafeSlice, TensorMeta, _safe_open_handle, safe_open
from stio.compat.safetensors._serialize import deserialize, serialize, serialize_file
from stio.compat.safetensors._specs import TensorSpec

if TYPE_CHECKING:
    from stio.compat.safetensors._prefetch import PrefetchLoader as PrefetchLoader

__all__ = [
    "PrefetchLoader",
    "PySafeSlice",
    "SafetensorError",
    "TensorMeta",
    "TensorSpec",
    "__version__",
    "deserialize",
    "safe_open",
    "serialize",
    "serialize_file",
]

__version__ = "0.8.0"
"""The release of the original with this behaviour; libraries compare it. `prefetch` and `get_tensor_meta` are those of
0.9.0rc1, which is no release."""

_safe_open_handle = _safe_open_handle  # not in `__all__`, as there

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "PrefetchLoader":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = import_module("stio.compat.safetensors._prefetch").PrefetchLoader
        return value
