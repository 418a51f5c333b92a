"""stio streams safetensors checkpoints between storage and devices, asynchronously.

    tensors = await stio.load("model/", device="cuda")

Names are imported when they are first used, so that `import stio` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from stio import sync as sync
    from stio.cache import HostCache as HostCache
    from stio.codec.header import TensorInfo as TensorInfo
    from stio.counters import Stats as Stats
    from stio.counters import stats as stats
    from stio.device.sources import LazyTensor as LazyTensor
    from stio.errors import AmbiguousCheckpointError as AmbiguousCheckpointError
    from stio.errors import ChangedDuringReadError as ChangedDuringReadError
    from stio.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from stio.errors import ClosedError as ClosedError
    from stio.errors import CommitUncertainError as CommitUncertainError
    from stio.errors import ConcurrentSaveError as ConcurrentSaveError
    from stio.errors import DeviceError as DeviceError
    from stio.errors import DeviceMemoryError as DeviceMemoryError
    from stio.errors import FormatError as FormatError
    from stio.errors import IndexFormatError as IndexFormatError
    from stio.errors import IntegrityError as IntegrityError
    from stio.errors import LimitError as LimitError
    from stio.errors import MismatchError as MismatchError
    from stio.errors import NoSpaceError as NoSpaceError
    from stio.errors import SaveInProgressError as SaveInProgressError
    from stio.errors import SharedTensorsError as SharedTensorsError
    from stio.errors import SliceError as SliceError
    from stio.errors import StioError as StioError
    from stio.errors import StorageError as StorageError
    from stio.errors import TensorNotFoundError as TensorNotFoundError
    from stio.errors import TruncatedError as TruncatedError
    from stio.errors import UnsafePathError as UnsafePathError
    from stio.errors import UnsupportedDtypeError as UnsupportedDtypeError
    from stio.errors import WarmStartError as WarmStartError
    from stio.events import Limits as Limits
    from stio.events import ProgressEvent as ProgressEvent
    from stio.events import Span as Span
    from stio.events import Trace as Trace
    from stio.into import LoadReport as LoadReport
    from stio.pending import PendingSave as PendingSave
    from stio.reader import Checkpoint as Checkpoint
    from stio.reader import Stream as Stream
    from stio.reader import load as load
    from stio.reader import load_into as load_into
    from stio.reader import open as open
    from stio.saving import SaveResult as SaveResult
    from stio.shelf import CacheStats as CacheStats
    from stio.state import load_state as load_state
    from stio.state import save_state as save_state
    from stio.warming import WarmStart as WarmStart
    from stio.warming import warm_start as warm_start
    from stio.writer import Saver as Saver
    from stio.writer import save as save

_HOMES = {
    "AmbiguousCheckpointError": "stio.errors",
    "CacheStats": "stio.shelf",
    "ChangedDuringReadError": "stio.errors",
    "Checkpoint": "stio.reader",
    "CheckpointNotFoundError": "stio.errors",
    "ClosedError": "stio.errors",
    "CommitUncertainError": "stio.errors",
    "ConcurrentSaveError": "stio.errors",
    "DeviceError": "stio.errors",
    "DeviceMemoryError": "stio.errors",
    "FormatError": "stio.errors",
    "HostCache": "stio.cache",
    "IndexFormatError": "stio.errors",
    "IntegrityError": "stio.errors",
    "LazyTensor": "stio.device.sources",
    "LimitError": "stio.errors",
    "Limits": "stio.events",
    "LoadReport": "stio.into",
    "MismatchError": "stio.errors",
    "NoSpaceError": "stio.errors",
    "PendingSave": "stio.pending",
    "ProgressEvent": "stio.events",
    "SaveInProgressError": "stio.errors",
    "SaveResult": "stio.saving",
    "Saver": "stio.writer",
    "SharedTensorsError": "stio.errors",
    "SliceError": "stio.errors",
    "Span": "stio.events",
    "Stats": "stio.counters",
    "StioError": "stio.errors",
    "StorageError": "stio.errors",
    "Stream": "stio.reader",
    "TensorInfo": "stio.codec.header",
    "TensorNotFoundError": "stio.errors",
    "Trace": "stio.events",
    "TruncatedError": "stio.errors",
    "UnsafePathError": "stio.errors",
    "UnsupportedDtypeError": "stio.errors",
    "WarmStart": "stio.warming",
    "WarmStartError": "stio.errors",
    "load": "stio.reader",
    "load_into": "stio.reader",
    "load_state": "stio.state",
    "open": "stio.reader",
    "save": "stio.writer",
    "save_state": "stio.state",
    "stats": "stio.counters",
    "warm_start": "stio.warming",
}

__all__ = [  # noqa: PLE0604  # the table is the one list of names; a test compares it with the imports above
    "__version__",
    "sync",
    *_HOMES,
]


def _adopt(home: str) -> None:
    """Take in all public names of one home, so that they say `stio.X` and find each other here."""
    module = import_module(home)
    for name, place in _HOMES.items():
        if place == home:
            value = globals()[name] = getattr(module, name)
            if vars(value).get("__annotations__"):  # they name what their own file imports, and not what is here
                value.__annotations__ = get_type_hints(value, vars(module))
            value.__module__ = __name__


if not TYPE_CHECKING:  # or a checker would take a name that is mistyped for one of ours

    def __getattr__(name: str) -> Any:
        if name == "sync":
            return import_module("stio.sync")
        if name not in _HOMES:
            raise AttributeError(f"module 'stio' has no attribute {name!r}")
        _adopt(_HOMES[name])
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_adopt("stio.errors")  # costs nothing, and an error says stio.X whoever raises it first
