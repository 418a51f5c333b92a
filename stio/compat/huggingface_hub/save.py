"""Saves to a directory by the hub's rules. The transaction is that of every save; a `HubDirectory` names the files.

Of names whose tensors overlap on one storage, one is saved: the first of those that cover the storage.
The files always have the hub's names, and the same files are removed as by the hub. A directory is a `Destination`, so
shards are written as in any other save; `torch.save` writes pickles into the transaction's staging directory. Several
processes may save to one directory at once: each publication replaces the files that exist at that moment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stio.compat.safetensors.torch import _find_shared_tensors, _remove_duplicate_names
from stio.device.describe import describe_tensors
from stio.device.tensor_memory import ON_META
from stio.errors import DeviceError, StioError, printable
from stio.format.index import parse_index
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX, index_name, is_checkpoint_file
from stio.runtime.notifier import run_blocking
from stio.saving.options import SaveOptions
from stio.saving.pending import PendingSave
from stio.saving.plan import plan_files
from stio.storage.checks import refusals
from stio.storage.commit.transaction import NamedFiles

_FORMAT = {"format": "pt"}


def require_plain(pattern: str) -> None:
    """Require a pattern that names files of one directory, each by a name of its own."""
    if set(index_name(pattern)) & {"/", "\\", "\0"}:
        raise ValueError(f"filename_pattern {printable(pattern)!r} must name files, without a directory or NUL")


def without_duplicates(
    tensors: Mapping[str, torch.Tensor], discard: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors without all but one of the names that share memory, and the saved name of each dropped one.

    A tensor that overlaps with none is saved whether or not it covers its storage.

    Raises:
        SharedTensorsError: Tensors overlap, and none of them covers the storage.
        DeviceError: A tensor on meta.
        TypeError: A value is not a tensor, or a tensor without memory of its own; a name is not text.
        ValueError: A tensor that cannot be saved: sparse, nested, freed.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise DeviceError(f"tensor {printable(name)!r} {ON_META}")
    describe_tensors(tensors)  # refuses what cannot be saved
    groups = [group for group in _find_shared_tensors(tensors) if len(group) > 1]
    shared = {name: tensors[name] for group in groups for name in group}
    duplicates = _remove_duplicate_names(shared, discard_names=discard)
    dropped = {name: saved for saved, names in duplicates.items() for name in names}
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}, dropped


@dataclass(frozen=True, slots=True)
class HubDirectory(NamedFiles):
    """An existing directory with files that have the hub's names, as the destination of a save."""

    pattern: str
    """Pattern of the files' names; contains `{suffix}` once."""
    removes: bool
    """Whether the files of an older checkpoint are removed."""

    def old_names(self, names: Sequence[str], index: bytes | None) -> Sequence[str]:
        """Return the names that the hub removes, the index first, and stio's own shards that the index names."""
        if not self.removes:
            return ()
        before, _, after = self.pattern.partition("{suffix}")
        rule = re.compile(
            rf"{re.escape(before)}(-[0-9]{{5}}-of-[0-9]{{5}})?{re.escape(after)}({re.escape(INDEX_SUFFIX)})?"
        )
        old = [name for name in names if rule.fullmatch(name)]
        if index is not None and self.index.endswith(FILE_SUFFIX + INDEX_SUFFIX):
            with suppress(StioError):  # a broken index names no files
                # Shards with a save id in their names are found by the index only: later saves need it to remove them.
                shards = parse_index(index, path=self.index).shards
                old += [name for name in shards if is_checkpoint_file(name, self.pattern)]
        return sorted(dict.fromkeys(old), key=lambda name: not name.endswith(INDEX_SUFFIX))


def index_text(metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> bytes:
    """Return the bytes of an index as the hub writes it: metadata in the caller's order, of any JSON type.

    Raises:
        TypeError: The metadata hold a value that JSON cannot express.
    """
    return json.dumps({"metadata": dict(metadata), "weight_map": dict(weight_map)}, indent=2).encode()


def save_tensors(
    place: HubDirectory,
    tensors: Mapping[str, torch.Tensor],
    split: Mapping[str, Sequence[str]],
    metadata: Mapping[str, str],
    index: bytes | None,
) -> None:
    """Save safetensors files; returns when they are durable and in place.

    Args:
        place: The directory.
        tensors: By name.
        split: Names of the tensors in each file.
        metadata: Text for the header, if there is one file.
        index: The index, if there are several.
    """
    header = {**_FORMAT, **metadata} if index is None else _FORMAT
    listed = [(list(names), header) for names in split.values()]
    planner = partial(plan_files, files=listed, index=index)
    # A manifest is found by the pattern. The hub writes safetensors under any name, stio under such patterns only.
    pattern = place.pattern if place.pattern.endswith(FILE_SUFFIX) else place.pattern + FILE_SUFFIX
    run_blocking(PendingSave(tensors, place, SaveOptions(filename_pattern=pattern), planner=planner).complete())


def save_pickles(
    place: HubDirectory, state_dict: Mapping[str, Any], split: Mapping[str, Sequence[str]], index: bytes | None
) -> None:
    """Save files by `torch.save`; returns when they are durable and in place."""
    transaction = place.begin()
    try:
        with refusals("saving", place.path, caught=(OSError,)):
            for file, names in split.items():
                # By path: torch names the archive's inner directory after the file.
                torch.save({name: state_dict[name] for name in names}, os.path.join(transaction.files_path, file))
                transaction.finish_file(file)
            transaction.commit(index=index)
    finally:
        transaction.roll_back()
