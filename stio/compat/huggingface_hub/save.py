"""Saves to a directory by the hub's rules. The transaction is that of every save; its policy is `HubDirectory.plan`.

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
from stio.errors import DeviceError, StioError, StorageError, printable
from stio.format.files.index import parse_index
from stio.format.files.names import FILE_SUFFIX, INDEX_SUFFIX, FilePattern
from stio.runtime.notifier import run_blocking
from stio.saving.options import SaveOptions
from stio.saving.pending import PendingSave
from stio.saving.plan import plan_files
from stio.storage.checks import refusals, resolve_links
from stio.storage.commit import syscalls as calls
from stio.storage.commit.destination import CommitPlan, LocalDestination, existing_checkpoint
from stio.storage.commit.directory_lock import directory_lock
from stio.storage.commit.files import MAX_INDEX_BYTES, closing, read_small, write_refused
from stio.storage.commit.transaction import LocalTransaction

_FORMAT = {"format": "pt"}


def require_plain(pattern: str) -> None:
    """Require a pattern that names files of one directory, each by a name of its own."""
    if set(FilePattern(pattern).index) & {"/", "\\", "\0"}:
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
    on_meta = {name: one for name, one in tensors.items() if isinstance(one, torch.Tensor) and one.is_meta}
    try:
        describe_tensors(on_meta or tensors)  # refuses what cannot be saved
    except ValueError as error:
        raise DeviceError(str(error)) if on_meta else error from None
    groups = [group for group in _find_shared_tensors(tensors) if len(group) > 1]
    shared = {name: tensors[name] for group in groups for name in group}
    duplicates = _remove_duplicate_names(shared, discard_names=discard)
    dropped = {name: saved for saved, names in duplicates.items() for name in names}
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}, dropped


@dataclass(frozen=True, slots=True)
class HubDirectory:
    """An existing directory, as the destination of a save."""

    path: str
    """As the caller gave it."""
    pattern: str
    """Pattern of the files' names; contains `{suffix}` once."""
    files: tuple[str, ...]
    """Names of the new files of tensors."""
    removes: bool
    """Whether the files of an older checkpoint are removed."""

    def begin(self, **_: object) -> LocalTransaction:
        """Begin a save. It is durable and uses the hub's names, independent of its options.

        Raises:
            FileNotFoundError, NotADirectoryError: There is no such directory; the hub's callers catch these.
            StorageError: The operating system refused.
        """
        real, home_fd = self._open()
        destination = LocalDestination(self.path, "update", real, "")
        return LocalTransaction(destination, self.plan, durable=True, last_wins=True, home_fd=home_fd)

    def clear(self) -> None:
        """Remove the old checkpoint if no new one replaces it; its index first."""
        with closing(self._open()[1]) as home_fd, _refusals(self.path), directory_lock(home_fd, self.path):
            for name in self.plan(home_fd, "").existing.files:
                calls.unlink(name, dir_fd=home_fd)
                if name.endswith(INDEX_SUFFIX):
                    calls.sync_directory(home_fd)
            calls.sync_directory(home_fd)

    def plan(self, home_fd: int, save_id: str) -> CommitPlan:
        """Make the plan of a save by the hub's rules; a `CommitPolicy`."""
        index = FilePattern(self.pattern).index
        raw = read_small(home_fd, index, MAX_INDEX_BYTES, where=self.path)
        is_sharded = len(self.files) > 1
        old = self._old_names(home_fd, index, raw) if self.removes else []
        names = [name for name in (*old, *self.files) if not (is_sharded and name == index)]
        existing = existing_checkpoint(home_fd, index, raw, names)
        if not is_sharded:
            return CommitPlan("file", self.files, None, existing)
        # Existing names are replaced one by one. After a crash, recovery completes the replacement from a record.
        taken = existing.files.keys() & set(self.files)
        return CommitPlan("files" if taken else "index", self.files, index, existing)

    def _old_names(self, home_fd: int, index: str, raw: bytes | None) -> list[str]:
        """Return the names that the hub removes, the index first, and stio's own shards that the index names."""
        before, _, after = self.pattern.partition("{suffix}")
        rule = re.compile(
            rf"{re.escape(before)}(-[0-9]{{5}}-of-[0-9]{{5}})?{re.escape(after)}({re.escape(INDEX_SUFFIX)})?"
        )
        names = [name for name in sorted(os.listdir(home_fd)) if rule.fullmatch(name)]
        if raw is not None and index.endswith(FILE_SUFFIX + INDEX_SUFFIX):
            with suppress(StioError):  # a broken index names no files
                # Shards with a save id in their names are found by the index only: later saves need it to remove them.
                names += [
                    name for name in parse_index(raw, path=index).shards if FilePattern(self.pattern).matches(name)
                ]
        return sorted(dict.fromkeys(names), key=lambda name: not name.endswith(INDEX_SUFFIX))

    def _open(self) -> tuple[str, int]:
        """Return the path of the directory without links, and the directory, open."""
        try:
            real = resolve_links(self.path)
            return real, calls.open_directory(real)
        except (StorageError, FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise write_refused("opening the directory", self.path, error) from error


_refusals = partial(refusals, "saving", error_of=write_refused, caught=(OSError,))


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
        with _refusals(place.path):
            for file, names in split.items():
                # By path: torch names the archive's inner directory after the file.
                torch.save({name: state_dict[name] for name in names}, os.path.join(transaction.files_path, file))
                transaction.finish_file(file)
            transaction.commit(index=index)
    finally:
        transaction.roll_back()
