"""Sources of a conversion: a safetensors checkpoint, a file of `torch.save`, or several such files under an index.

Each becomes an `OpenSource`: tensors by name, the ties among them, and the text metadata. Opening reads names and
headers only. Pickles are mapped. The tensors of safetensors files are read by `ReadAhead`, in the order in which the
save writes them, one window of memory ahead.

Neighbours in that order are read together, so that a small tensor does not cost a read of its own. A tensor larger than
the window is read in rows, so that memory is bounded. Each read is a small load with an `Operation` of its own: the
stop callback and the memory of a load live as long as its operation, and must be released after each read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from stio.conversion.safe_pickle import PickleRefused, PlainPickles, decode_name, looks_encoded, shown
from stio.conversion.torch_files import (
    Key,
    is_safetensors,
    kind_of_file,
    part_beside_code,
    read_pickle,
    read_start,
    tensors_in,
    value_at,
)
from stio.device import TORCH_DTYPES, LazyTensor, Lost, describe_tensors
from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    LimitError,
    UnsafePathError,
    listed,
    printable,
)
from stio.format import TensorInfo, TiedNames, may_be_copied, resolve_shared
from stio.format.files import FILE_SUFFIX, PICKLE_SUFFIXES, FileName, NamedCheckpoint, parse_index
from stio.limits import Limits
from stio.loading import LoadOptions, collect, planned_casts, select_tensors
from stio.runtime import Operation
from stio.saving import tied_names
from stio.storage import broken_link, open_directory, refusals
from stio.storage.checkpoint import OpenCheckpoint, OpenOptions, open_checkpoint
from stio.text import is_url, log

_MAX_NAMES = 4096
"""Most tensors in one read. To plan 4,096 tensors takes some milliseconds."""

_Tensors = dict[str, torch.Tensor]

_Unit = tuple[list[str], slice | None]
"""One read: names of whole tensors, or one name and the rows of that tensor."""


class ReadAhead:
    """Reads ahead by one unit. `take` is called by one thread at a time, in the expected order.

    Args:
        opened: The checkpoint; closed by `close`.
        names: New name of each tensor, with its name in the checkpoint.
        dtype: Cast floating tensors to it.
        window_bytes: Most bytes in one read, unless one row is larger. Two reads are in memory at once.
    """

    def __init__(
        self,
        opened: OpenCheckpoint,
        names: Mapping[str, str],
        *,
        dtype: torch.dtype | None,
        window_bytes: int,
    ) -> None:
        self._opened = opened
        self._names = names
        self.lost = Lost()
        """Counts the values that casts lose."""
        self._settings = LoadOptions(dtype=dtype, memory="copy", budget_bytes=window_bytes, lost=self.lost)
        self._window_bytes = window_bytes
        self._units: Iterator[_Unit] = iter(())
        self._loaded: _Tensors = {}
        self._ahead: Operation[Callable[[], _Tensors]] | None = None
        self._stopped = False

    def expect(self, names: Sequence[str]) -> None:
        """Set the order of the calls of `take`, before the first of them; start the first read."""
        self._units = iter(self._cut(names))
        self._read_next()

    def take(self, name: str) -> torch.Tensor | Iterator[torch.Tensor]:
        """Return a tensor, or an iterator of its rows.

        Raises:
            StioError: The read failed.
        """
        if self._is_cut(name):
            return (self._next().pop(name) for _ in self._row_cuts(name))
        if name not in self._loaded:
            self._loaded = self._next()
        return self._loaded.pop(name)

    def stop(self) -> None:
        """End the read under way, and start no other. Callable from any thread."""
        self._stopped = True
        ahead = self._ahead
        if ahead is not None:
            ahead.cancel()

    def close(self) -> None:
        """Stop, wait for the read under way, and close the checkpoint. `take` must not be under way."""
        self.stop()
        if self._ahead is not None:
            self._ahead.close()
        self._loaded = {}
        self._opened.close()

    def _next(self) -> _Tensors:
        """Return the tensors that were read ahead, and start the read of the next ones."""
        ahead = self._ahead
        assert ahead is not None, "`take` was called more often than expected"
        take = ahead.result()
        self._read_next()
        return take()

    def _read_next(self) -> None:
        names, rows = next(self._units, ([], None))
        if not names:
            self._ahead = None
            return
        stored = {self._names[name]: name for name in names}
        slices: dict[str, object] = {} if rows is None else dict.fromkeys(stored, rows)

        def body(operation: Operation[Any]) -> Callable[[], _Tensors]:
            selected = select_tensors(self._opened, list(stored), self._settings, slices=slices)
            take = collect(operation, selected)
            return lambda: {stored[name]: tensor for name, tensor in take().items()}

        operation = Operation(body, name="load")
        self._ahead = operation
        if self._stopped:  # `stop` may have been called before
            operation.cancel()
        operation.start()

    def _cut(self, names: Sequence[str]) -> Iterator[_Unit]:
        together: list[str] = []
        total = 0
        for name in names:
            nbytes = self._info(name).nbytes
            cut = self._is_cut(name)
            if together and (cut or total + nbytes > self._window_bytes or len(together) == _MAX_NAMES):
                yield together, None
                together, total = [], 0
            if cut:
                yield from (([name], rows) for rows in self._row_cuts(name))
            else:
                together.append(name)
                total += nbytes
        if together:
            yield together, None

    def _is_cut(self, name: str) -> bool:
        info = self._info(name)
        return info.nbytes > self._window_bytes and bool(info.shape)

    def _row_cuts(self, name: str) -> list[slice]:
        info = self._info(name)
        num_rows = info.shape[0]
        step = self._window_bytes * num_rows // info.nbytes
        step = max(1, step - step % 2)  # even: two elements of F4 are one byte
        return [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]

    def _info(self, name: str) -> TensorInfo:
        return self._opened.info(self._names[name])


@dataclass(kw_only=True)
class OpenSource:
    """An open source of a conversion."""

    tensors: Mapping[str, torch.Tensor | LazyTensor]
    """Tensors to save, by name."""
    files: Sequence[str]
    """Paths of the files that are read."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Text metadata of the source; counts of an index are numbers."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Tied names, each with the name that has the data. Only ties that shared memory does not show."""
    tied: TiedNames | None = None
    """What the module declares about tied names, if the source is a pickle of one."""
    lost: Lost = field(default_factory=Lost)
    """Counts the values that casts lose, while the tensors are saved."""
    reader: ReadAhead | None = None
    """Reads the tensors of a safetensors checkpoint."""


def open_source(
    path: str,
    *,
    dtype: torch.dtype | None,
    window_bytes: int,
    key: Key | None,
    trust_pickle: bool,
    check: Callable[[], None],
) -> OpenSource:
    """Open a source; blocks.

    Args:
        path: See `stio.convert`.
        dtype: Floating tensors are cast to it.
        window_bytes: Bytes of one read.
        key: Key of the tensors in a pickle, or path of keys.
        trust_pickle: Unpickle anything.
        check: Called between files; may raise.

    Raises:
        StioError: See `stio.convert`.
        ValueError: There is a key, and the source is not a pickle.
    """
    try:
        found = pickle_files(path)
        if found is None:
            if key is not None and (os.path.lexists(path) or is_url(path)):
                raise ValueError("key= is for files of torch.save; a safetensors checkpoint is flat")
            return _open_safetensors(path, dtype, window_bytes, check)
    except (UnsafePathError, LimitError) as error:  # which advise what a conversion does not take
        message = error.message.replace("pass follow_symlinks=True", "copy the file there")
        error.message = message.replace("pass limits=", "save what stio.load returns with limits=")
        error.args = (error.message,)
        raise
    pickles = found.paths
    tensors: dict[str, torch.Tensor] = {}
    file_of: dict[str, str] = {}
    tied: TiedNames | None = None
    for file in pickles:
        check()
        beside_code = partial(part_beside_code, file, key)
        loaded = read_pickle(file, trust_pickle=trust_pickle, mapped=True, beside_code=beside_code)
        part = tensors_in(file, loaded, key)
        module = loaded if key is None else value_at(file, loaded, key)
        if isinstance(module, nn.Module) and len(pickles) == 1:
            tied = tied_names(module, part)
        if doubled := sorted(part.keys() & tensors.keys()):
            raise IndexFormatError(
                f"two files hold the tensor {printable(doubled[0])!r}, so they are of different saves; load each by "
                "`torch.load(FILE, weights_only=True)`, and give the tensors of the right one to stio.save",
                path=file,
                expected="one",
                found=" and ".join(map(os.path.basename, (file_of[doubled[0]], file))),
            )
        tensors |= part
        file_of |= dict.fromkeys(part, file)
    if key is None:  # otherwise the names may be others than those of the index
        found.require_named(file_of)
    return OpenSource(**_cast(tensors, dtype, tied, path), files=pickles, tied=tied)


# Which files a path means.


@dataclass(frozen=True, slots=True)
class _Pickles:
    """The files of `torch.save` that a path means."""

    paths: list[str]
    """The files."""
    index: str | None = None
    """Path of their index; None: they have none."""
    weight_map: Mapping[str, str] = field(default_factory=dict)
    """Name of the file of each tensor, by the index."""

    def require_named(self, file_of: Mapping[str, str]) -> None:
        """Require that each tensor is in the file that the index names for it. What it leaves out is converted too.

        Args:
            file_of: Path of the file that holds each tensor.

        Raises:
            IndexFormatError: A tensor is in no file, or in another one.
        """
        folder = os.path.dirname(self.index or "")
        for name, shard in self.weight_map.items():
            file = file_of.get(name)
            if file != os.path.join(folder, shard):
                raise IndexFormatError(
                    f"tensor {printable(name)!r} is not in the file that the index names for it, so index and files "
                    "are of different saves; fetch them again, or remove the index if the files are a complete set",
                    path=self.index,
                    expected=f"{printable(name)} in {printable(shard)}",
                    found="it in no file" if file is None else f"it in {printable(os.path.basename(file))}",
                )
        left_out = [name for name in file_of if name not in self.weight_map] if self.index is not None else []
        if left_out:
            message = "%s: the files hold tensors that are not in the index, and are converted too: %s"
            log(logging.WARNING, message, printable(self.index), listed(left_out))


def pickle_files(path: str) -> _Pickles | None:
    """Return the files of `torch.save` that a path means, None if it means safetensors or nothing."""
    if os.path.isdir(path):
        return _pickles_in(path)
    if not os.path.lexists(path):  # opening it raises the clearest error
        return None
    if FileName(path).is_index:
        return _indexed_pickles(path)
    kind = kind_of_file(path)
    if path.endswith(PICKLE_SUFFIXES) if kind is None else not kind.is_safetensors:
        return _Pickles([path])  # `read_pickle` refuses what torch.save did not write
    return None


def _pickles_in(directory: str) -> _Pickles | None:
    with refusals("listing the directory", directory):
        names = sorted(name for name in map(FileName, os.listdir(directory)) if not name.is_hidden)
    if any(name.is_checkpoint for name in names):
        return None
    indices = [name for name in names if name.is_index and name.whole.endswith(PICKLE_SUFFIXES)]
    files = NamedCheckpoint.without_index((name for name in names if name.is_pickle), PICKLE_SUFFIXES)
    if len(indices) == 1:
        _require_inside(directory, indices)
        return _indexed_pickles(os.path.join(directory, indices[0]), beside=names)
    if not indices and len(files) == 1:
        files[0].require_complete(path=directory)
        paths = _require_inside(directory, files[0].files)
        # Safetensors under other names: opening the directory as safetensors raises the clearest error.
        return None if all(map(is_safetensors, paths)) else _Pickles(paths)
    if not indices and not files:
        return None  # opening it as safetensors raises the clearest error
    message = "the directory holds several checkpoints; give the path of the one you mean"
    raise AmbiguousCheckpointError(message, path=directory, found=listed(indices or map(str, files)))


def _indexed_pickles(path: str, *, beside: Sequence[str] = ()) -> _Pickles | None:
    """Return the files that an index names, None if they are safetensors. Warns of others beside it with its name."""
    index = parse_index(read_start(path, Limits().header_bytes + 1), path=path, suffix="")
    if not index.shards:
        raise IndexFormatError("the weight_map names no files", path=path)
    named = NamedCheckpoint.of_index(os.path.basename(path))
    if others := named.beside(index.shards, beside, PICKLE_SUFFIXES)[0]:
        log(logging.WARNING, "%s", named.warning_of_others(os.path.dirname(path), others))
    if any(name.endswith(FILE_SUFFIX) for name in index.shards):
        return None
    try:
        paths = _require_inside(os.path.dirname(path), index.shards)
    except CheckpointNotFoundError as error:
        message = "the index names a file that does not exist; the download may be incomplete"
        raise CheckpointNotFoundError(message + broken_link(error.path or ""), path=error.path) from None
    return _Pickles(paths, path, index.weight_map)


def _require_inside(directory: str, names: Sequence[str]) -> list[str]:
    """Return the paths of files that a directory or an index names; each must pass the rule for shards.

    Raises:
        CheckpointNotFoundError: A file does not exist.
        UnsafePathError: A file is a link that leads out of the directory.
        StorageError: A file is no regular one, or the operating system reported an error.
    """
    with open_directory(directory or ".", follow_symlinks=False) as root:
        for name in names:
            root.open(name).close()
    return [os.path.join(directory, name) for name in names]


# The tensors in them.


def _cast(
    tensors: dict[str, torch.Tensor], dtype: torch.dtype | None, tied: TiedNames | None, path: str
) -> dict[str, Any]:
    """Return lazy tensors for those to be cast, and the ties that their memory does not show."""
    if dtype is None:
        return {"tensors": tensors}
    _, ties = resolve_shared(describe_tensors(tensors), "dedupe", tied)
    kinds = {name: TORCH_DTYPES.name(tensor.dtype) for name, tensor in tensors.items()}
    casts, lost = planned_casts(kinds, dtype, path=path, by_name=False), Lost()
    lazy: dict[str, torch.Tensor | LazyTensor] = dict(tensors)
    for name, tensor in tensors.items():
        wanted = casts.dtype(name, tensor.dtype)
        if wanted != tensor.dtype:
            lazy[name] = LazyTensor(wanted, tensor.shape, partial(_rows, name, tensor.detach(), wanted, lost))
    shown_ties = {alias: name for alias, name in ties.items() if isinstance(lazy[name], LazyTensor)}
    return {"tensors": lazy, "lost": lost, "ties": shown_ties}


def _rows(name: str, tensor: torch.Tensor, dtype: torch.dtype, lost: Lost) -> Any:
    """Return a scalar tensor, or an iterator of the rows of a tensor, cast about 16 MiB at a time."""
    if not tensor.dim():
        return lost.cast(name, tensor, dtype)
    count = max(1, (16 << 20) * len(tensor) // max(1, tensor.nbytes))
    return (lost.cast(name, tensor[begin : begin + count], dtype) for begin in range(0, len(tensor), count))


def _common_metadata(opened: OpenCheckpoint) -> dict[str, Any]:
    """Return the metadata that hold for the whole checkpoint; a warning names those that differ between its shards."""
    left_out = sorted(filter(may_be_copied, opened.differing_metadata))
    if left_out:
        message = "%s: metadata that differ between the shards are left out: %s"
        log(logging.WARNING, message, printable(opened.path), listed(left_out))
    return {key: value for key, value in opened.metadata.items() if key not in opened.differing_metadata}


def _open_safetensors(path: str, dtype: torch.dtype | None, window_bytes: int, check: Callable[[], None]) -> OpenSource:
    opened = open_checkpoint(path, OpenOptions(allow_trailing=True, check=check))
    opened.require_plain()
    try:
        names = {**_plain_names(opened), **opened.aliases}
        infos = {name: opened.info(stored) for name, stored in names.items()}
        TORCH_DTYPES.require([info.dtype for info in infos.values()], path=opened.path)
        reader = ReadAhead(opened, names, dtype=dtype, window_bytes=window_bytes)
        kinds = {name: kind for name, (kind, _) in opened.dtypes_and_shapes().items()}
        casts = planned_casts(kinds, dtype, path=path, by_name=False)
        tensors = {
            name: LazyTensor(
                casts.dtype(names[name], TORCH_DTYPES[info.dtype]),
                TORCH_DTYPES.shape(info.dtype, info.shape),
                partial(reader.take, name),
            )
            for name, info in infos.items()
        }
        return OpenSource(
            tensors=tensors,
            files=[file.path for file in opened.files],
            metadata=_common_metadata(opened),
            ties=dict(opened.aliases),
            reader=reader,
            lost=reader.lost,
        )
    except BaseException:
        opened.close()
        raise


def _plain_names(opened: OpenCheckpoint) -> dict[str, str]:
    """Return the new name of each tensor, with its stored name.

    Raises:
        FormatError: A file of OLMo that holds more than tensors, or two key paths that give one name.
    """
    stored = [name for header in opened.headers for name in header.names]
    if not looks_encoded(stored):
        return {name: name for name in stored}
    pickles = PlainPickles()
    names: dict[str, str] = {}
    others = []
    try:
        for name in stored:
            keys, is_pickled = decode_name(name, pickles)
            if is_pickled:
                others.append(shown(keys))
                continue
            joined = ".".join(map(str, keys))
            if joined in names:
                raise FormatError("two key paths give the same name", path=opened.path, found=joined)
            names[joined] = name
    except PickleRefused as error:
        raise FormatError(f"a name of OLMo's cannot be read: {error}", path=opened.path, found=name) from error
    if others:
        raise FormatError(
            "the file holds OLMo's nested state with values that are not tensors, which plain safetensors cannot hold; "
            "load it by stio.compat.olmo",
            path=opened.path,
            found=listed(others),
        )
    return names
