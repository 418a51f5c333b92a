"""The `safetensors` package's names, on stio: change the import and keep the code.

Reading maps the file and copies nothing, or reads just the bytes that are wanted (`backend="pread"`); it runs in the
caller's thread. Saving is atomic and durable. Where the original has a defect this package has none of it; what
differs on purpose stands in the documentation of each function.
"""

from stio.compat.safetensors._errors import SafetensorError
from stio.compat.safetensors._open import _safe_open_handle, safe_open
from stio.compat.safetensors._serialize import deserialize, serialize, serialize_file
from stio.compat.safetensors._spec import TensorSpec

__all__ = ["SafetensorError", "TensorSpec", "__version__", "deserialize", "safe_open", "serialize", "serialize_file"]

__version__ = "0.8.0"
"""The release of the original whose behaviour this is; libraries compare it."""

_safe_open_handle = _safe_open_handle
