"""Files of `torch.save`: read without executing them, mapped where their format allows it, and their tensors by name.

A file of torch.save often holds the tensors below one or more keys, `{"model": {"state_dict": ...}, "epoch": 3}`. The
first error names the paths of keys that lead to tensors by name, so that the second call succeeds.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import sys
import tarfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch
from torch import nn

from stio.device import describe_tensors
from stio.errors import (
    AmbiguousCheckpointError,
    FormatError,
    HostMemoryError,
    StorageError,
    TensorNotFoundError,
    UnsupportedDtypeError,
    listed,
    printable,
)
from stio.format.files import FILE_SUFFIX, FileKind, kind_of
from stio.process import contextmanager
from stio.runtime.memory import reporting_shortage
from stio.storage import LocalFile, refusals
from stio.text import counted, log


@contextmanager
def _opened(path: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file; return it and its size.

    Raises:
        CheckpointNotFoundError: There is no such file.
        StorageError: It is no regular file, or the operating system reported an error.
    """
    with (
        refusals("reading the file", path),
        closing(LocalFile.open(path)) as opened,
        open(opened.fd, "rb", closefd=False) as file,
    ):
        yield file, opened.identity.nbytes


def read_start(path: str, nbytes: int) -> bytes:
    """Return the first bytes of a file, at most `nbytes`; raise as `_opened` does."""
    with _opened(path) as (file, _):
        return file.read(nbytes)


def kind_of_file(path: str) -> FileKind | None:
    """Return the kind of a file; None: it is of no known kind."""
    with _opened(path) as (file, nbytes):
        return kind_of(lambda begin, end: os.pread(file.fileno(), end - begin, begin), nbytes, path)


def is_safetensors(path: str) -> bool:
    """Return whether a file starts like one of safetensors."""
    kind = kind_of_file(path)
    return kind is not None and kind.is_safetensors


def read_pickle(
    path: str,
    *,
    map_location: Any = "cpu",
    trust_pickle: bool = False,
    mapped: bool = False,
    beside_code: Callable[[Any, str], Any] | None = None,
) -> Any:
    """Return the object that `torch.save` wrote.

    Args:
        path: The file.
        map_location: As in `torch.load`.
        trust_pickle: Execute the code in the pickle (`weights_only=False`), with a warning.
        mapped: Map a file of the new format instead of reading it, so that its tensors cost page cache only. A file of
            the old format is read in any case.
        beside_code: Called if torch refuses the file for its objects, with the value, in which placeholders stand for
            all that needs code, and with the message of the refusal. Returns what this function returns, or raises.

    Raises:
        CheckpointNotFoundError: There is no such file.
        FormatError: It is broken or of another kind, holds objects that only `trust_pickle` reads, or needs a module
            that is not here.
        HostMemoryError: The host has too little memory for its tensors.
        StorageError: The operating system reported an error.
    """
    kind = kind_of_file(path)
    if kind is None or not kind.is_torch_save:
        if kind is None or kind.is_safetensors:
            raise FormatError("not a file of torch.save, by its first bytes; fetch it again", path=path)
        raise FormatError(kind.refusal(path), path=path)
    in_zip = read_start(path, len(_ZIP_START)) == _ZIP_START
    if trust_pickle:
        warnings.warn(
            f"{printable(path)}: unpickling, which can run any code, because of trust_pickle=True",
            RuntimeWarning,
            stacklevel=3,
        )
    options = {"map_location": map_location, "mmap": mapped and in_zip and not path.endswith(FILE_SUFFIX)}
    try:
        return _load(path, weights_only=not trust_pickle, **options)
    except HostMemoryError:
        raise
    except pickle.UnpicklingError as error:
        refused = None if trust_pickle else _REFUSED.search(str(error))
        is_blocked = "is blocked" in str(error)
        message = f"the file cannot be unpickled: {_reason(error)}{'' if trust_pickle else _ON_TRUST}"
        if refused is not None:
            message = _about_class(refused[1], is_blocked=is_blocked)
        if beside_code is not None and not (trust_pickle or is_blocked):
            value = _without_code(path, options)
            if value is not None:
                return beside_code(value, message)
        raise FormatError(message, path=path) from error
    except OSError as error:
        raise StorageError(f"the file cannot be read: {printable(str(error))}", path=path, errno=error.errno) from error
    except Exception as error:  # torch raises nearly any error for a malformed file
        if isinstance(error, ImportError) or (isinstance(error, AttributeError) and "get attribute" in str(error)):
            message = f"the file needs code that is not here ({_reason(error)}); {_IN_THE_PROGRAM}"
            raise FormatError(message, path=path) from error
        raise FormatError(f"the file is damaged: {_reason(error)}; fetch it again", path=path) from error


def _load(path: str, *, mmap: bool, **options: Any) -> Any:
    """Return `torch.load` of a file; one that the system does not map is read."""
    # torch would read a file of this name as safetensors.
    with reporting_shortage(path), open(path, "rb") if path.endswith(FILE_SUFFIX) else nullcontext(path) as source:
        try:
            return torch.load(source, mmap=mmap, **options)
        except Warning:  # an error by the filters of the caller, such as `python -W error`; the file is not damaged
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _load(path, mmap=mmap, **options)
        except RuntimeError as error:  # before anything is unpickled
            if not mmap or not str(error).startswith("unable to mmap "):
                raise
            text = "%s is read into memory, since it cannot be mapped: %s"
            log(logging.WARNING, text, printable(path), _reason(error))
            return torch.load(source, mmap=False, **options)


_READERS: Any = torch.serialization
"""Has the private readers of both formats; the public `torch.load` chooses TorchScript by the content."""


def _without_code(path: str, options: Mapping[str, Any]) -> Any:
    """Return the value of a file with placeholders for what needs code; None: it is damaged too, or has been replaced.

    It calls the two readers of `torch.load`, which itself would run the code of a TorchScript archive. The file is
    opened once, so that the one that is checked here is the one that is read.
    """
    how: dict[str, Any] = {"pickle_module": _PICKLES_WITHOUT_CODE, "encoding": "utf-8"}
    how["map_location"] = options["map_location"]
    try:
        with _opened(path) as (file, nbytes), reporting_shortage(path), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if os.pread(file.fileno(), len(_ZIP_START), 0) != _ZIP_START:
                is_tar = tarfile.is_tarfile(file)  # torch would unpack it
                file.seek(0)
                return None if is_tar else _READERS._legacy_load(file, **how)
            reader = torch._C.PyTorchFileReader(file)
            if "constants.pkl" in reader.get_all_records():
                return None
            if options["mmap"]:
                how["overall_storage"] = torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", False, nbytes)
            return _READERS._load(reader, **how)
    except HostMemoryError:
        raise
    except Exception:  # torch raises nearly any error for a malformed file
        return None


class _Uncalled:
    """An object whose class or function is not called: takes any arguments and items, and keeps none."""

    def __new__(cls, *args: object, **keywords: object) -> _Uncalled:
        return object.__new__(cls)

    def __call__(self, *args: object, **keywords: object) -> _Uncalled:
        return self

    append = extend = add = __setitem__ = __call__


_Unpickler: Any = pickle._Unpickler


class _UnpicklerWithoutCode(_Unpickler):  # type: ignore[misc]  # typeshed knows only what the one in C has
    """Makes tensors and plain values; imports nothing, and calls nothing that the file names but torch's for tensors.

    It is Python's, and not the one in C, because no state may be set: that of a class or a function in the pickle
    would change it for the whole process.
    """

    dispatch: ClassVar = {**_Unpickler.dispatch, pickle.BUILD[0]: lambda unpickler: unpickler.stack.pop()}

    def find_class(self, module: str, name: str) -> Any:
        if module in _MAKE_TENSORS and name in _MAKE_TENSORS[module]:
            return vars(sys.modules[module])[name]
        if (module, name) in _WITHOUT_STATE:
            return _WITHOUT_STATE[module, name]
        found = vars(torch).get(name) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else type(name.rpartition(".")[2], (_Uncalled,), {})

    def get_extension(self, code: int) -> None:
        self.append(_Uncalled)  # not what the program has registered


_MAKE_TENSORS = {
    "collections": ("OrderedDict",),
    "torch": ("Size",),
    "torch._utils": ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"),
    "torch.storage": ("UntypedStorage",),
}


def _parameter(data: Any, requires_grad: bool, *_: object) -> Any:
    return nn.Parameter(data, requires_grad) if isinstance(data, torch.Tensor) else _Uncalled()


def _of_type(function: Callable[..., Any], kind: object, arguments: Sequence[Any], *_: object) -> Any:
    return function(*arguments) if kind is _TENSOR else _Uncalled()


_TENSOR = type("Tensor", (_Uncalled,), {})
_WITHOUT_STATE: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Tensor"): _TENSOR,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}
"""Makes parameters, and tensors with attributes such as those of `nn.Buffer`; leaves the attributes out."""

_PICKLES_WITHOUT_CODE = SimpleNamespace(
    __name__=__name__,
    Unpickler=_UnpicklerWithoutCode,
    load=lambda file, **options: _UnpicklerWithoutCode(file, **options).load(),
)
"""What the readers of torch use in place of the module `pickle`."""


_ZIP_START = b"PK\x03\x04"
_REFUSED = re.compile(r"GLOBAL ([A-Za-z_][\w.]*)")

_ON_TRUST = "; trust_pickle=True reads more than tensors and plain values, and runs code that the file chose"
_IN_THE_PROGRAM = "save its state_dict() with the program that wrote it"


def _about_class(name: str, *, is_blocked: bool) -> str:
    """Return the message about a class or function that is not read without trust."""
    text = f"the file holds an object that needs {printable(name)}, and stio reads tensors and plain values only"
    if is_blocked:
        return f"{text}; that is code which no checkpoint needs: do not read the file with trust_pickle=True"
    module = name.partition(".")[0]
    if module != "__main__" and (module in sys.modules or find_spec(module) is not None):
        return text + _ON_TRUST
    return f"{text}; its module {printable(module)!r} is not here, so {_IN_THE_PROGRAM}"


def _reason(error: BaseException) -> str:
    """Return the first sentence of the reason in an error of torch, without its advice to trust the file."""
    text = str(error)
    text = text.partition("WeightsUnpickler error:")[2] or text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[0].split(". ")[0] if lines else type(error).__name__)


Key = str | Sequence[str | int]
"""What `key=` takes: one key, keys joined by dots, or a sequence of keys."""

_MAX_DEPTH, _MAX_VALUES = 16, 20_000
"""Bounds on the search for tensors in a nested value."""
_NESTED = (Mapping, list, tuple, nn.Module)

_SAVE_STATE = "stio.save_state(torch.load(FILE), DESTINATION) stores nested values too, and stio.load_state loads them"


def check_key(key: Key | None) -> None:
    """Raise `TypeError` for a value that `key=` does not take."""
    if key is None or isinstance(key, str):
        return
    if not isinstance(key, Sequence) or isinstance(key, bytes) or not all(isinstance(one, str | int) for one in key):
        raise TypeError(f"key= takes text, or a sequence of keys, not {key!r}")


def tensors_in(path: str, loaded: Any, key: Key | None) -> dict[str, torch.Tensor]:
    """Return the tensors by name that a pickle holds, or a part of it.

    Args:
        path: The file, to name in errors.
        loaded: The unpickled value.
        key: Key or path of keys of the part.

    Raises:
        AmbiguousCheckpointError: It holds other values too; the message names the keys that lead to tensors.
        TensorNotFoundError: It has no such key.
        FormatError: It holds no tensors by name.
    """
    value = loaded if key is None else value_at(path, loaded, key)
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if _is_flat(value):
        tensors = dict(value)
        try:
            describe_tensors(tensors)
        except UnsupportedDtypeError as error:
            error.path = path
            raise
        except (TypeError, ValueError) as error:  # the file is wrong here, not the call
            raise FormatError(f"{error}; do that in Python, and give the tensors to stio.save", path=path) from error
        return tensors
    before = () if key is None else _steps(loaded, key) or ()
    advice = _advice(loaded, [(*before, *steps) for steps in _paths_to_tensors(value)])
    where = "" if key is None else " under this key"
    if not isinstance(value, Mapping):
        raise FormatError(f"the file holds no tensors by name{where}; {advice}", path=path, found=type(value).__name__)
    message = f"the file holds more than tensors by name{where}; {advice}"
    raise AmbiguousCheckpointError(message, path=path, found=listed(_described(value)))


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in value.items()
    )


def part_beside_code(path: str, key: Key | None, value: Any, refusal: str) -> Any:
    """Return a value with placeholders if what `key` means has none; see `read_pickle`.

    Raises:
        FormatError: The part needs code, or is not there. The message names the keys that lead to tensors.
    """
    with suppress(TensorNotFoundError):
        if _is_flat(value if key is None else value_at(path, value, key)):
            return value
    paths = _paths_to_tensors(value)
    message = f"{refusal.partition('; ')[0]}; {_advice(value, paths)}, which needs no code" if paths else refusal
    raise FormatError(message, path=path)


def value_at(path: str, loaded: Any, key: Key) -> Any:
    """Return what a pickle holds under a key or path of keys; raise `TensorNotFoundError` if it has none."""
    steps = _steps(loaded, key)
    if steps is None:
        message = f"the file has no such key; {_advice(loaded, _paths_to_tensors(loaded))}"
        raise TensorNotFoundError(
            message, path=path, requested=key if isinstance(key, str) else list(key), found=listed(_children(loaded))
        )
    for step in steps:
        loaded = _children(loaded)[step]
    return loaded


def _steps(value: Any, key: Key) -> tuple[Any, ...] | None:
    """Return the keys that `key=` means in a value, None if there is no such path.

    Text is one key, or keys joined by dots; at each level the longest key that fits is taken first.
    """
    children = _children(value)
    ways: list[tuple[Any, Key]]
    if isinstance(key, str):
        known, parts = {str(one): one for one in children}, key.split(".")
        cuts: Any = [(key, ()), *((".".join(parts[:k]), ".".join(parts[k:])) for k in range(len(parts) - 1, 0, -1))]
        ways = [(known[first], rest) for first, rest in cuts if first in known]
    else:
        ways = [(key[0], key[1:])] if key and key[0] in children else []
    for step, rest in ways:
        steps = _steps(children[step], rest)
        if steps is not None:
            return step, *steps
    return None if key or isinstance(key, str) else ()


def _children(value: Any) -> Mapping[Any, Any]:
    """Return the values below a value by their keys; those of a list by their numbers."""
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _paths_to_tensors(value: Any) -> list[tuple[Any, ...]]:
    """Return the keys that lead to tensors by name, those of the most tensors first."""
    found: list[tuple[int, tuple[Any, ...]]] = []
    ahead: deque[tuple[tuple[Any, ...], Any]] = deque([((), value)])
    left = _MAX_VALUES
    while ahead and left:
        left -= 1
        steps, one = ahead.popleft()
        if isinstance(one, nn.Module):
            one = one.state_dict()
        if steps and one and _is_flat(one):
            found.append((len(one), steps))
        elif len(steps) < _MAX_DEPTH:
            nested = (pair for pair in _children(one).items() if isinstance(pair[1], _NESTED))
            ahead += [((*steps, key), child) for key, child in nested]
    return [steps for _, steps in sorted(found, key=lambda item: -item[0])]


def _advice(loaded: Any, paths: Sequence[tuple[Any, ...]]) -> str:
    """Return what to do: the keys that lead to tensors, or how to store a value without any."""
    if not paths:
        return _SAVE_STATE
    shown = [_as_key(loaded, steps) for steps in paths[:2]]
    if len(paths) == 1:
        return f"its tensors are under {shown[0]}"
    more = f" (and {counted(len(paths) - 2, 'other')})" if len(paths) > 2 else ""
    return f"choose one part of it: {' or '.join(shown)}{more}"


def _as_key(loaded: Any, steps: tuple[Any, ...]) -> str:
    """Return an argument `key=` for some keys: text, if that leads to the same place."""
    text = ".".join(map(str, steps))
    return f"key={printable(text)!r}" if _steps(loaded, text) == steps else f"key={steps!r}"


def _described(value: Mapping[Any, Any]) -> Iterator[str]:
    """Yield each entry that is no tensor of a name, with its kind."""
    for name, one in value.items():
        if not (isinstance(name, str) and isinstance(one, torch.Tensor)):
            size = f" of {len(one):,}" if isinstance(one, Mapping | list) else ""
            yield f"{printable(name)!r} ({type(one).__name__}{size})"
