"""The names of the `safetensors` package, implemented by stio: change the import and keep the code.

Reading runs in the caller's thread. It maps the file and copies nothing, or reads the requested bytes only
(`backend="pread"`). Saving is atomic and durable. Intended differences are described at each function.

Start with `_open`, which has `safe_open` and numpy's arrays. `_file` has the open file, the base class of a framework
and the errors; `_tensors` makes torch's tensors, and loads them to devices and in the background; `numpy` has raw
tensors too, and works without torch; `torch` has the saves and shared memory, `_installed` the objects of
`stio.compat.install`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stio.compat.safetensors._file import SafetensorError
from stio.compat.safetensors._open import PySafeSlice, TensorMeta, _safe_open_handle, safe_open
from stio.compat.safetensors.numpy import TensorSpec, deserialize, serialize, serialize_file

if TYPE_CHECKING:
    from stio.compat.safetensors._tensors import PrefetchLoader as PrefetchLoader

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
        value = globals()[name] = import_module("stio.compat.safetensors._tensors").PrefetchLoader
        return value
