"""What lies beside a saved checkpoint and keeps readers of the directory from it. It is logged, after the commit.

A save replaces what it has saved before. The index of another checkpoint in the directory is not its own, so it stays,
and readers of the directory follow it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import closing, nullcontext, suppress

from stio.errors import StioError, printable
from stio.format.files import (
    FILE_SUFFIX,
    INDEX_SUFFIX,
    FileName,
    FilePattern,
    NamedCheckpoint,
    choose,
    parse_index,
    step_of,
)
from stio.limits import Limits
from stio.saving.options import DEFAULT_PATTERN
from stio.saving.plan import WrittenSave
from stio.storage import ParallelRoot, Root, open_directory, read_bytes
from stio.storage.checkpoint import OpenOptions, open_checkpoint
from stio.text import log

_READ_BY_NAME = {"diffusion_pytorch_model.safetensors": "diffusers", "adapter_model.safetensors": "PEFT"}
"""Files that a library reads whatever else is in a directory."""


def warn_of_link_to_step(path: str, resolved: str) -> None:
    """Log that a destination leads by a link to a step, which the save will replace.

    Args:
        path: The destination, absolute.
        resolved: The same without links.
    """
    path = os.path.normpath(path)
    if path == resolved:
        return
    named, reached = step_of(path), step_of(resolved)
    if reached is None or (named is not None and named.number == reached.number) or not os.path.lexists(resolved):
        return
    # A directory whose name is a number, with further directories, may be that of a job: `123456/final`.
    if reached.path == resolved or not os.path.basename(reached.path).isdecimal() or os.path.isfile(resolved):
        log(
            logging.WARNING,
            "%s leads by a link to %s, so the save replaces step %d; save to a path of its own, and change the link "
            "when that save is durable",
            printable(path),
            printable(resolved),
            reached.number,
        )


def warn_of_surroundings(root: Root | None, written: WrittenSave, pattern: str | None) -> None:
    """Log what lies beside a saved checkpoint and keeps readers of the directory from it. Nothing is raised.

    Args:
        root: The directory in a store; None: it is a local one.
        written: The checkpoint, which was published.
        pattern: Pattern of its file names; None: the destination is one file.
    """
    directory = written.path if pattern is not None else os.path.dirname(written.path)
    # It is opened under `suppress`: the checkpoint is published, and no failure here is one of the save.
    with (
        suppress(StioError),
        open_directory(directory, follow_symlinks=False) if root is None else nullcontext(root) as place,
    ):
        names = None if isinstance(place, ParallelRoot) else {*place.listdir()}
        if names is not None and names <= {*written.names, written.index}:
            return  # nearly always
        if pattern == DEFAULT_PATTERN and names is not None:
            _warn_of_another_name(place, names, written.tensor_names)
        hiding = _hiding_index(place, names, written)
        if hiding is not None:
            log(
                logging.WARNING,
                "%s: saved, but a load of its directory follows %s there; load it by its path, or delete that index "
                "and its shards",
                printable(
                    written.path
                    if pattern is None
                    else f"{written.path.rstrip('/')}/{written.index or written.names[0]}"
                ),
                printable(hiding),
            )


def _hiding_index(root: Root, present: Collection[str] | None, written: WrittenSave) -> str | None:
    """Return the index by which a load of a directory gets other files than those of a save; None: there is none.

    A variant, such as `model.fp16.safetensors`, is meant to be loaded by its name. What cannot be read does not decide.
    """
    index, files = written.index, written.names
    with suppress(StioError):
        own = (
            NamedCheckpoint.of_index(index)
            if index is not None
            else next(iter(NamedCheckpoint.without_index(files)), None)
        )
        if own is None or (index is None and any(FileName(name).shard is not None for name in files)):
            return None  # no name of a checkpoint; or a shard of one whose index comes later
        if present is None:  # of a store: a list of all names may be long, and these decide
            present = [
                name
                for name in dict.fromkeys([FilePattern(DEFAULT_PATTERN).index, own.whole + INDEX_SUFFIX])
                if _exists(root, name)
            ]
        found = choose({*present, *files}, path=root.path).index
        if found is None or found == index or own.is_variant_of(NamedCheckpoint.of_index(found)):
            return None
        with closing(root.open(found)) as file:
            raw = read_bytes(file, 0, min(file.identity.nbytes, Limits().header_bytes))
        other = parse_index(raw, path=file.path)
        is_gone = not any(shard in present or _exists(root, shard) for shard in other.shards)
        if is_gone or not other.weight_map or not {*other.shards}.isdisjoint(files):
            return None
        if NamedCheckpoint.of_index(found).stem == own.stem or not other.weight_map.keys().isdisjoint(
            written.tensor_names
        ):
            return found
    return None


def _warn_of_another_name(root: Root, present: Collection[str], tensors: Collection[str]) -> None:
    """Log that a directory has a file with the saved tensors that a framework reads by its name."""
    for name in _READ_BY_NAME.keys() & present:
        path = os.path.join(root.path, name)
        with suppress(StioError), closing(open_checkpoint(path, OpenOptions())) as opened:
            if opened.dtypes_and_shapes().keys().isdisjoint(tensors):
                continue
            log(
                logging.WARNING,
                "%s: saved, but %s reads %s there, which has tensors of these names; save with filename_pattern=%r, or "
                "delete that file",
                printable(root.path),
                _READ_BY_NAME[name],
                name,
                name.replace(FILE_SUFFIX, "{suffix}" + FILE_SUFFIX),
            )


def _exists(root: Root, name: str) -> bool:
    with suppress(StioError):
        root.open(name).close()
        return True
    return False
