"""Finds out whether a load of the directory of a new checkpoint would load an older one instead, by an index there.

A save replaces what it has saved before. The index of another checkpoint in the directory is not its own, so it stays,
and readers of the directory follow it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import closing, suppress

from stio.errors import StioError, printable
from stio.format.directory import INDEX_NAME, NamedCheckpoint, choose, of_index, without_index
from stio.format.header import PREFIX_BYTES, header_nbytes, parse_header
from stio.format.index import ShardIndex, parse_index
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX, shard_number
from stio.runtime.limits import Limits
from stio.runtime.log import log
from stio.runtime.memory import allocate
from stio.storage.base import ParallelRoot, Root, Source
from stio.storage.open import open_directory

_READ_BY_NAME = {"diffusion_pytorch_model.safetensors": "diffusers", "adapter_model.safetensors": "PEFT"}
"""Files that a library reads whatever else is in a directory."""


def hiding_index(root: Root, index: str | None, files: Collection[str], tensors: Iterable[str]) -> str | None:
    """Return the index by which a load of a directory gets other files than those of a save; None: there is none.

    Nothing is raised: what cannot be read does not decide either.

    Args:
        root: The directory.
        index: The index of the saved checkpoint, if it has one.
        files: Its files.
        tensors: Names of its tensors.

    Returns:
        The name of the index. A variant, such as `model.fp16.safetensors`, is meant to be loaded by its name.
    """
    with suppress(StioError):
        own = of_index(index) if index is not None else next(iter(without_index(files)), None)
        if own is None or (index is None and any(shard_number(name) is not None for name in files)):
            return None  # no name of a checkpoint; or a shard of one whose index comes later
        names = _names(root, own)
        found = choose({*names, *files}, path=root.path).index
        if found is None or found == index or own.is_variant_of(of_index(found)):
            return None
        other = _read(root, found)
        is_gone = not any(shard in names or _exists(root, shard) for shard in other.shards)
        if is_gone or not other.weight_map or not {*other.shards}.isdisjoint(files):
            return None
        if of_index(found).stem == own.stem or not other.weight_map.keys().isdisjoint(tensors):
            return found
    return None


def hiding_on_disk(path: str, index: str | None, files: Collection[str], tensors: Iterable[str]) -> str | None:
    """Return what `hiding_index` finds in the directory of a saved file, or in a saved directory.

    Args:
        path: The destination, on this machine.
        index: See `hiding_index`.
        files: See `hiding_index`.
        tensors: See `hiding_index`.
    """
    with (
        suppress(StioError),
        open_directory(path if os.path.isdir(path) else os.path.dirname(path), follow_symlinks=False) as root,
    ):
        return hiding_index(root, index, files, tensors)
    return None


def warn_of_another_name(path: str, tensors: Iterable[str]) -> None:
    """Log that the directory of a saved checkpoint has a file with its tensors that a framework reads by its name.

    Args:
        path: The directory, on this machine, to which a save with the default pattern of names has saved.
        tensors: Names of the tensors of the saved checkpoint.
    """
    with suppress(StioError), open_directory(path, follow_symlinks=False) as root:
        for name, library in _READ_BY_NAME.items():
            with suppress(StioError), closing(root.open(name)) as file:
                if _tensors_of(file).isdisjoint(tensors):
                    continue
                log(
                    logging.WARNING,
                    "%s: saved, but %s reads %s there, which has tensors of these names; save with "
                    "filename_pattern=%r, or delete that file",
                    printable(path),
                    library,
                    name,
                    name.replace(FILE_SUFFIX, "{suffix}" + FILE_SUFFIX),
                )


def warn_of_hiding(hiding: str, path: str, first: str | None) -> None:
    """Log that a load of the directory of a saved checkpoint gets another one.

    Args:
        hiding: The index that it follows.
        path: The destination.
        first: Index or first file of the checkpoint, if the destination is a directory.
    """
    log(
        logging.WARNING,
        "%s: saved, but a load of its directory follows %s there; load it by its path, or delete that index "
        "and its shards",
        printable(path if first is None else f"{path.rstrip('/')}/{first}"),
        printable(hiding),
    )


def _tensors_of(file: Source) -> set[str]:
    """Return the names in a header."""
    file_bytes = file.identity.nbytes
    prefix = _bytes(file, 0, min(PREFIX_BYTES, file_bytes))
    nbytes = header_nbytes(prefix, file_bytes=file_bytes, path=file.path)
    raw = _bytes(file, PREFIX_BYTES, nbytes)
    return {*parse_header(raw, file_bytes=file_bytes, path=file.path, shard="").names}


def _bytes(file: Source, offset: int, nbytes: int) -> bytes:
    region = allocate(max(nbytes, 1)).sub(0, nbytes)
    file.read_into(offset, [region])
    return region.tobytes()


def _names(root: Root, own: NamedCheckpoint) -> list[str]:
    """Return the names in a directory; of a store those that decide, since a list of all of them may be long."""
    if not isinstance(root, ParallelRoot):
        return [*root.listdir()]
    return [name for name in dict.fromkeys([INDEX_NAME, own.whole + INDEX_SUFFIX]) if _exists(root, name)]


def _exists(root: Root, name: str) -> bool:
    with suppress(StioError):
        root.open(name).close()
        return True
    return False


def _read(root: Root, name: str) -> ShardIndex:
    with closing(root.open(name)) as file:
        return parse_index(_bytes(file, 0, min(file.identity.nbytes, Limits().header_bytes)), path=file.path)
