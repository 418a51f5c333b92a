"""The names of the `safetensors` package, implemented by stio: change the import and keep the code.

Reading runs in the caller's thread. It maps the file and copies nothing, or reads the requested bytes only
(`backend="pread"`). Saving is atomic and durable. Intended differences are described at each function.

`_open` has `safe_open`; `_file` has the open file and the base class of a framework; `_arrays` (numpy), `_tensors`
(torch) and `_accelerator` (torch on a device) are the frameworks, with `_index` for the indices of slices.
`_serialize` has raw tensors without torch, `_write` the saves, `_shared` shared memory, `_errors` the original's
errors. `numpy` works without torch, and only a load to a device imports stio's loads.
"""

from stio.compat.safetensors._errors import SafetensorError
from stio.compat.safetensors._open import _safe_open_handle, safe_open
from stio.compat.safetensors._serialize import TensorSpec, deserialize, serialize, serialize_file

__all__ = ["SafetensorError", "TensorSpec", "__version__", "deserialize", "safe_open", "serialize", "serialize_file"]

__version__ = "0.8.0"
"""The release of the original with this behaviour; libraries compare it."""

_safe_open_handle = _safe_open_handle
