"""stio streams safetensors checkpoints between storage and devices, asynchronously.

    tensors = await stio.load("model/", device="cuda")

Names are imported when they are first used, so that `import stio` does not import torch. Most of them do, which takes
seconds. A program with an event loop calls `await stio.preload()` first, which imports all of them on a thread.

Levels, from the base: `errors.py`; `runtime/`; `format/` (pure); `device/` and `storage/`; `loading/` and `saving/`;
`remote/` (stores, and the hub); `conversion/`, `distributed/`, `serving/` (caches, pools, warm starts) and `state.py`
(nested state); this module and `sync.py` (blocking twins); `cli/`, `compat/`, `integrations/` and `testing/`. A package
imports from lower levels only. Start with `loading/` or `saving/`.
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
    from stio.conversion.api import convert as convert
    from stio.device.describe import LazyTensor as LazyTensor
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
    from stio.format.header import TensorInfo as TensorInfo
    from stio.limits import Limits as Limits
    from stio.loading.api import Checkpoint as Checkpoint
    from stio.loading.api import Stream as Stream
    from stio.loading.api import load as load
    from stio.loading.api import load_into as load_into
    from stio.loading.api import open as open
    from stio.loading.options import LoadOptions as LoadOptions
    from stio.loading.target import LoadReport as LoadReport
    from stio.remote.disk_cache import DiskCache as DiskCache
    from stio.remote.source import RemoteRoot as RemoteRoot
    from stio.runtime.reports.counters import Stats as Stats
    from stio.runtime.reports.counters import stats as stats
    from stio.runtime.reports.progress import ProgressEvent as ProgressEvent
    from stio.runtime.reports.spans import Span as Span
    from stio.runtime.reports.trace import Trace as Trace
    from stio.saving.api import Saver as Saver
    from stio.saving.api import save as save
    from stio.saving.options import SaveOptions as SaveOptions
    from stio.saving.options import SaveResult as SaveResult
    from stio.saving.pending import PendingSave as PendingSave
    from stio.serving.host_cache import HostCache as HostCache
    from stio.serving.pool.api import ModelPool as ModelPool
    from stio.serving.pool.policy import ModelStatus as ModelStatus
    from stio.serving.pool.policy import PoolStats as PoolStats
    from stio.serving.warm_start.api import WarmStart as WarmStart
    from stio.serving.warm_start.api import warm_start as warm_start
    from stio.state import load_state as load_state
    from stio.state import save_state as save_state
    from stio.storage.checkpoint.caches import CacheStats as CacheStats
    from stio.storage.checkpoint.latest import latest as latest

_NAMES = {
    "stio.conversion.api": "convert",
    "stio.device.describe": "LazyTensor",
    "stio.format.header": "TensorInfo",
    "stio.limits": "Limits",
    "stio.loading.api": "Checkpoint Stream load load_into open",
    "stio.loading.options": "LoadOptions",
    "stio.loading.target": "LoadReport",
    "stio.remote.disk_cache": "DiskCache",
    "stio.remote.source": "RemoteRoot",
    "stio.runtime.reports.counters": "Stats stats",
    "stio.runtime.reports.progress": "ProgressEvent",
    "stio.runtime.reports.spans": "Span",
    "stio.runtime.reports.trace": "Trace",
    "stio.saving.api": "Saver save",
    "stio.saving.options": "SaveOptions SaveResult",
    "stio.saving.pending": "PendingSave",
    "stio.serving.host_cache": "HostCache",
    "stio.serving.pool.api": "ModelPool",
    "stio.serving.pool.policy": "ModelStatus PoolStats",
    "stio.serving.warm_start.api": "WarmStart warm_start",
    "stio.state": "load_state save_state",
    "stio.storage.checkpoint.caches": "CacheStats",
    "stio.storage.checkpoint.latest": "latest",
    "stio.errors": " ".join(errors.__all__),
}
"""Public names by the module that defines them."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [  # noqa: PLE0604  # a test compares the table with the imports above
    "__version__",
    "preload",
    "sync",
    *sorted(_MODULE_OF),
]


def _import_names(module_name: str) -> None:
    """Import all public names of one module, so that their `repr` says `stio.X` and their annotations resolve here."""
    module = import_module(module_name)
    for name, place in _MODULE_OF.items():
        if place == module_name:
            value = globals()[name] = getattr(module, name)
            if vars(value).get("__annotations__"):  # their names resolve in their own module only
                value.__annotations__ = get_type_hints(value, vars(module))
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
