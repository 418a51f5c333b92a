"""Saving into a directory by the hub's rules, through stio's one way to publish: staged, synced, renamed, then cleaned.

The files always have the hub's names, and what goes is what the hub removes. A directory is a `Destination` of the
save path, so that shards are written as in any other save; pickles are staged beside them and published by the same
steps. Several processes may save to one directory at once: who publishes replaces what stands there by then.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch

from stio.errors import StioError, StorageError
from stio.format.index import parse_index
from stio.format.naming import index_name, is_checkpoint_file
from stio.format.sharding import TensorSource
from stio.runtime.limits import DEFAULT_BUDGET_BYTES
from stio.saving.options import SaveOptions
from stio.saving.pending import PendingSave
from stio.saving.plan import WritePlan, plan_files
from stio.saving.staging_pool import StagingPool
from stio.storage.base import Transaction
from stio.storage.commit import syscalls as calls
from stio.storage.commit.file_writer import write_refused
from stio.storage.commit.journal import FILES_NAME, MAX_INDEX_BYTES, digest_of, read_small
from stio.storage.commit.publish import Publisher
from stio.storage.commit.recovery import reclaim
from stio.storage.commit.staging_dir import PREFIX, Staging, locked
from stio.storage.commit.target import Destination, ExistingCheckpoint, Names, identity_at, mode_at
from stio.storage.commit.transaction import LocalTransaction

__all__ = ["HubDirectory", "index_text", "save_pickles", "save_tensors"]

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".index.json"
_FORMAT = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class HubDirectory:
    """An existing directory, as a destination of a save."""

    path: str
    """As the caller gave it."""
    pattern: str
    """Of the files' names; holds `{suffix}` once."""
    files: tuple[str, ...]
    """Names of the new files of tensors."""
    removes: bool
    """Whether the files of an older checkpoint go."""

    def begin(
        self,
        *,
        num_shards: int,
        filename_pattern: str,
        shard_names: Literal["auto", "hub"],
        commit: Literal["index", "files"],
        durability: Literal["full", "none"],
    ) -> Transaction:
        """Begin a save of tensors; names and commit are the hub's whatever is asked for."""
        assert num_shards == len(self.files) and durability == "full"
        with self._opened() as (target, home_fd):
            reclaim(home_fd, target.home)
            standing, names = self._look(home_fd)
            home_fd = os.dup(home_fd)
            try:
                staging = Staging.create(home_fd)
            except BaseException:
                calls.close(home_fd)
                raise
            look = partial(self._look, home_fd)
            return LocalTransaction(
                target, standing, names, home_fd=home_fd, staging=staging, durable=True, relook=look
            )

    def publish_pickles(self, shards: Mapping[str, Mapping[str, Any]], index: bytes | None) -> None:
        """Save each shard by `torch.save`, and publish all of them."""
        with self._opened() as (target, home_fd):
            reclaim(home_fd, target.home)
            standing, names = self._look(home_fd)
            staging = Staging.create(home_fd)
            look = partial(self._look, home_fd)
            publisher = Publisher(target, standing, names, home_fd=home_fd, staging=staging, durable=True, relook=look)
            try:
                # By path: torch names the archive's inner directory after the file.
                where = os.path.join(target.home, PREFIX + staging.save_id, FILES_NAME)
                for name, shard in shards.items():
                    torch.save(dict(shard), os.path.join(where, name))
                    _finish(staging.files_fd, name, standing.shard_mode)
                publisher.publish(index, ())
            finally:
                if publisher.must_stay:
                    staging.release()
                else:
                    staging.remove()

    def clear(self) -> None:
        """Remove the old checkpoint, where nothing comes in its place: its index first."""
        with self._opened() as (target, home_fd), locked(home_fd, target.path):
            standing, _ = self._look(home_fd)
            for name in standing.files:
                calls.unlink(name, dir_fd=home_fd)
                if name.endswith(_INDEX_SUFFIX):
                    calls.sync_directory(home_fd)
            calls.sync_directory(home_fd)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Destination, int]]:
        try:
            home_fd = calls.open_directory(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise  # what the hub's callers catch
        except OSError as error:
            raise write_refused("opening the directory", self.path, error) from error
        try:
            yield Destination(self.path, "update", os.path.realpath(self.path), ""), home_fd
        except OSError as error:
            raise error if isinstance(error, StorageError) else write_refused("saving", self.path, error) from error
        finally:
            calls.close(home_fd)

    def _look(self, home_fd: int) -> tuple[ExistingCheckpoint, Names]:
        """Return what stands there and goes or is replaced, and how the new files are published over it."""
        index = index_name(self.pattern)
        raw = read_small(home_fd, index, MAX_INDEX_BYTES, where=self.path)
        sharded = len(self.files) > 1
        old = self._old_names(home_fd, index, raw) if self.removes else []
        listed = dict.fromkeys((*old, *self.files))
        files = {
            name: identity
            for name in listed
            if not (sharded and name == index) and (identity := identity_at(home_fd, name)) is not None
        }
        modes = (mode for name in files if (mode := mode_at(home_fd, name)) is not None and name != index)
        standing = ExistingCheckpoint(index, digest_of(raw), files, mode_at(home_fd, index), next(modes, None))
        if not sharded:
            return standing, Names("file", self.files, None)
        # Names that are taken are replaced one by one, under a record that a crash is rolled forward by.
        return standing, Names("files" if files.keys() & set(self.files) else "index", self.files, index)

    def _old_names(self, home_fd: int, index: str, raw: bytes | None) -> list[str]:
        """Return the names that the hub removes, the index first, and the shards of stio's own that it names."""
        before, _, after = self.pattern.partition("{suffix}")
        rule = re.compile(
            rf"{re.escape(before)}(-[0-9]{{5}}-of-[0-9]{{5}})?{re.escape(after)}({re.escape(_INDEX_SUFFIX)})?"
        )
        names = [name for name in sorted(os.listdir(home_fd)) if rule.fullmatch(name)]
        own: list[str] = []
        if raw is not None and index.endswith(_SUFFIX + _INDEX_SUFFIX):
            try:
                # Once their index is gone nobody would ever find, or remove, shards that are named by a save's id.
                shards = parse_index(raw, path=index).shards
                own = [name for name in shards if is_checkpoint_file(name, self.pattern)]
            except StioError:
                pass  # a broken index leads nowhere
        return sorted(dict.fromkeys((*names, *own)), key=lambda name: not name.endswith(_INDEX_SUFFIX))


def _finish(files_fd: int, name: str, mode: int | None) -> None:
    """Make a staged file durable, with the mode that its predecessor had."""
    fd = calls.open_file(name, os.O_RDWR, dir_fd=files_fd)
    try:
        if mode is not None:
            calls.fchmod(fd, mode)
        calls.fsync(fd)
    finally:
        calls.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubPlan(WritePlan):
    """A plan whose index was written beforehand: metadata in the caller's order, and not only text."""

    text: bytes | None
    """The index."""

    def index(self, shard_names: Sequence[str]) -> bytes:
        """Return the index."""
        assert self.text is not None
        return self.text


def index_text(metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> bytes:
    """Return the bytes of an index as the hub writes it.

    Raises:
        TypeError: The metadata hold what JSON has no word for.
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
        place: Where to.
        tensors: By name.
        split: Names of the tensors in each file.
        metadata: Text for the header, if there is one file.
        index: The index, if there are several.
    """
    header = {**_FORMAT, **metadata} if index is None else _FORMAT
    listed = [(list(names), header) for names in split.values()]

    def plan(sources: Sequence[TensorSource], *, block_bytes: int) -> WritePlan:
        made = plan_files(sources, listed, block_bytes=block_bytes)
        return _HubPlan(**{field.name: getattr(made, field.name) for field in fields(made)}, text=index)

    # A manifest is known by the pattern; the hub writes safetensors under any name, stio under names of its own.
    pattern = place.pattern if place.pattern.endswith(_SUFFIX) else place.pattern + _SUFFIX
    PendingSave(
        tensors,
        place,
        SaveOptions(filename_pattern=pattern),
        pool=StagingPool(DEFAULT_BUDGET_BYTES),
        stage_first=False,
        planner=plan,
    ).complete_blocking()


def save_pickles(
    place: HubDirectory, state_dict: Mapping[str, Any], split: Mapping[str, Sequence[str]], index: bytes | None
) -> None:
    """Save files of `torch.save`; returns when they are durable and in place."""
    place.publish_pickles({file: {name: state_dict[name] for name in names} for file, names in split.items()}, index)
