"""stio streams safetensors checkpoints between storage and devices, asynchronously.

    tensors = await stio.load("model/", device="cuda")

Names are imported when they are first used, so that `import stio` does not import torch. Most of them do, which takes
seconds. A program with an event loop calls `await stio.preload()` first, which imports all of them on a thread.

Levels, from the base: `errors.py`, `text.py`, `limits.py` and the like; `process/`; `runtime/` and `native/`; `format/`
(pure); `device/` and `storage/`; `loading/` and `saving/`; `remote/` (stores, and the hub); `conversion/`,
`distributed/`, `serving/` (caches, pools, warm starts) and `state.py` (nested state); this module and `sync.py`
(blocking twins); `cli/`, `compat/`, `integrations/` and `testing/`. A package imports from the faces of lower levels
only. Start with `loading/` or `saving/`.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

from stio import errors, schemes

__version__ = "0.1.0.dev0"

schemes.register(("s3", "gs", "az"), reads="stio.remote.source", saves="stio.remote.save")
schemes.register(("http", "https"), reads="stio.remote.source")
schemes.register(("hf",), reads="stio.remote.hub")

if TYPE_CHECKING:
    from stio import distributed as distributed
    from stio import sync as sync
    from stio.conversion import convert as convert
    from stio.device import LazyTensor as LazyTensor
    from stio.errors import AmbiguousCheckpointError as AmbiguousCheckpointError
    from stio.errors import ChangedDuringReadError as ChangedDuringReadError
    from stio.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from stio.errors import ClosedError as ClosedError
    from stio.errors import CommitUncertainError as CommitUncertainError
    from stio.errors import ConcurrentSaveError as ConcurrentSaveError
    from stio.errors import DeviceError as DeviceError
    from stio.errors import DeviceMemoryError as DeviceMemoryError
    from stio.errors import FormatError as FormatError
    from stio.errors import HostMemoryError as HostMemoryError
    from stio.errors import IndexFormatError as IndexFormatError
    from stio.errors import IntegrityError as IntegrityError
    from stio.errors import LimitError as LimitError
    from stio.errors import MismatchError as MismatchError
    from stio.errors import NoSpaceError as NoSpaceError
    from stio.errors import RankError as RankError
    from stio.errors import SaveInProgressError as SaveInProgressError
    from stio.errors import SharedTensorsError as SharedTensorsError
    from stio.errors import SliceError as SliceError
    from stio.errors import StallTimeoutError as StallTimeoutError
    from stio.errors import StioError as StioError
    from stio.errors import StorageError as StorageError
    from stio.errors import TensorNotFoundError as TensorNotFoundError
    from stio.errors import TruncatedError as TruncatedError
    from stio.errors import UnsafePathError as UnsafePathError
    from stio.errors import UnsupportedDtypeError as UnsupportedDtypeError
    from stio.errors import WarmStartError as WarmStartError
    from stio.format import TensorInfo as TensorInfo
    from stio.limits import Limits as Limits
    from stio.loading import Checkpoint as Checkpoint
    from stio.loading import LoadOptions as LoadOptions
    from stio.loading import Stream as Stream
    from stio.loading import load as load
    from stio.loading import load_into as load_into
    from stio.loading import open as open
    from stio.loading.targets import LoadReport as LoadReport
    from stio.remote import DiskCache as DiskCache
    from stio.remote import RemoteRoot as RemoteRoot
    from stio.runtime.reports import ProgressEvent as ProgressEvent
    from stio.runtime.reports import Span as Span
    from stio.runtime.reports import Stats as Stats
    from stio.runtime.reports import Trace as Trace
    from stio.runtime.reports import stats as stats
    from stio.saving import PendingSave as PendingSave
    from stio.saving import SaveOptions as SaveOptions
    from stio.saving import Saver as Saver
    from stio.saving import SaveResult as SaveResult
    from stio.saving import save as save
    from stio.serving import Follower as Follower
    from stio.serving import HostCache as HostCache
    from stio.serving import Version as Version
    from stio.serving import follow as follow
    from stio.serving.pool import ModelPool as ModelPool
    from stio.serving.pool import ModelStatus as ModelStatus
    from stio.serving.pool import PoolStats as PoolStats
    from stio.serving.warm_start import WarmStart as WarmStart
    from stio.serving.warm_start import warm_start as warm_start
    from stio.state import load_state as load_state
    from stio.state import save_state as save_state
    from stio.storage.checkpoint import CacheStats as CacheStats
    from stio.storage.checkpoint import latest as latest

_NAMES = {
    "stio.conversion": "convert",
    "stio.device": "LazyTensor",
    "stio.format": "TensorInfo",
    "stio.limits": "Limits",
    "stio.loading": "Checkpoint LoadOptions Stream load load_into open",
    "stio.loading.targets": "LoadReport",
    "stio.remote": "DiskCache RemoteRoot",
    "stio.runtime.reports": "ProgressEvent Span Stats Trace stats",
    "stio.saving": "PendingSave SaveOptions SaveResult Saver save",
    "stio.serving": "Follower HostCache Version follow",
    "stio.serving.pool": "ModelPool ModelStatus PoolStats",
    "stio.serving.warm_start": "WarmStart warm_start",
    "stio.state": "load_state save_state",
    "stio.storage.checkpoint": "CacheStats latest",
    "stio.errors": " ".join(errors.__all__),
}
"""Public names by the package whose face has them."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [  # noqa: PLE0604  # a test compares the table with the imports above
    "__version__",
    "preload",
    "sync",
    *sorted(_MODULE_OF),
]


def _import_names(module_name: str) -> None:
    """Import all public names of one package, so that their `repr` says `stio.X` and their annotations resolve here."""
    module = import_module(module_name)
    for name, place in _MODULE_OF.items():
        if place == module_name:
            value = globals()[name] = getattr(module, name)
            if vars(value).get("__annotations__"):  # their names resolve in their own module only
                value.__annotations__ = get_type_hints(value, vars(sys.modules[value.__module__]))
            value.__module__ = __name__


def _resolve(name: str) -> Any:
    """Import a public name with its module."""
    if name not in globals():
        _import_names(_MODULE_OF[name])
    return globals()[name]


async def preload() -> None:
    """Import torch, and all modules behind the names of stio, on a thread.

    Otherwise the first call of `stio.load`, or of another function, imports them in the calling thread, which takes
    seconds. Call this where a server starts, before the first load. The event loop goes on meanwhile, except while the
    system links torch's libraries (0.25 s if their files are in the page cache). If the modules are imported already,
    it returns at once. A cancelled call waits until the import has ended.
    """
    operation = import_module("stio.runtime.operation")
    await operation.Operation(lambda _: [_resolve(name) for name in _MODULE_OF], name="import").wait()


if not TYPE_CHECKING:  # or a checker would take a name that is mistyped for one of ours

    def __getattr__(name: str) -> Any:
        if name in ("compat", "distributed", "sync"):
            return import_module(f"stio.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'stio' has no attribute {name!r}")
        return _resolve(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not getattr(sys, "_is_gil_enabled", lambda: True)():
    warnings.warn(
        "this Python runs without the GIL, and stio has not been tested there; PYTHON_GIL=1 turns the GIL on",
        RuntimeWarning,
        stacklevel=2,
    )

_import_names("stio.errors")  # cheap, and every error has the name stio.X from the first time that it is raised
