"""One save to a local directory: staged where nobody looks, published by one rename, undone or finished after a crash.

Four ways to publish, by what stands at the destination (`destination.py`): a fresh directory is renamed into place;
one file is renamed over the old one; in a directory that holds a checkpoint the new shards are moved in under names of
their own and the index is renamed over the old one; and, where the caller insists on the hub's names, a durable
record commits and the files are replaced one by one. What is visible before and has to go after is written down first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from stio.errors import StorageError
from stio.format.naming import check_pattern
from stio.storage.base import Note
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.file_writer import LocalSink, create_sinks, write_refused
from stio.storage.commit.journal import MAX_NOTE_BYTES, read_small
from stio.storage.commit.publish import Publisher
from stio.storage.commit.recovery import reclaim
from stio.storage.commit.staging_dir import Staging
from stio.storage.commit.target import (
    Destination,
    ExistingCheckpoint,
    Names,
    OneFile,
    choose_names,
    look,
    make_parents,
    require_files,
    resolve,
)

__all__ = ["LocalTransaction", "begin_local"]


def begin_local(
    destination: str | os.PathLike[str],
    *,
    num_shards: int,
    filename_pattern: str = "model{suffix}.safetensors",
    shard_names: Literal["auto", "hub"] = "auto",
    commit: Literal["index", "files"] = "index",
    durability: Literal["full", "none"] = "full",
) -> LocalTransaction:
    """Begin a save: clean up after dead ones, look at what stands there, make a staging directory.

    Args:
        destination: One file if it ends in `.safetensors`, else a directory. Links are followed, missing parents made.
        num_shards: How many files of tensors there will be.
        filename_pattern: Of their names, in a directory.
        shard_names: "auto" gives shards the hub's names in a directory that holds no checkpoint, and names with the
            save's id beside an old one. "hub" gives them the hub's names always.
        commit: "index": readers through the index see the old or the new checkpoint, never both. "files" is needed
            for `shard_names="hub"` over a checkpoint: its files are then replaced one by one under the old index, and
            **a reader in that window (some milliseconds) may mix both**; a crash in it is rolled forward by the next
            save or `collect_garbage`, and until then the mixture stays.
        durability: "full": what `commit` has returned from survives a power cut. "none": nothing is synced; a crash
            of the process still leaves the old or the new checkpoint.

    Raises:
        ValueError: An argument is wrong, or they contradict each other or what stands at the destination.
        StorageError: The destination is of another kind, or cannot be written.
    """
    _check_arguments(num_shards, filename_pattern, shard_names, commit, durability)
    target = _resolved(destination, num_shards)
    durable = durability == "full"
    fds: list[int] = []
    try:
        make_parents(target.home, durable=durable)
        fds.append(home_fd := calls.open_directory(target.home))
        reclaim(home_fd, target.home)
        standing = look(home_fd, target, filename_pattern)
        choose = partial(
            choose_names,
            target,
            standing,
            num_shards=num_shards,
            pattern=filename_pattern,
            shard_names=shard_names,
            commit=commit,
        )
        # What cannot be is refused before anything is made.
        require_files(home_fd, target, choose(save_id="0" * 8))
        staging = Staging.create(home_fd)
        names = choose(save_id=staging.save_id)
        fds.clear()
        again = (lambda: (look(home_fd, target, filename_pattern), names)) if isinstance(destination, OneFile) else None
        return LocalTransaction(
            target, standing, names, home_fd=home_fd, staging=staging, durable=durable, relook=again
        )
    except OSError as error:
        raise error if isinstance(error, StorageError) else _not_begun(target.path, error) from error
    finally:
        for fd in fds:
            calls.close(fd)


def _check_arguments(num_shards: int, filename_pattern: str, shard_names: str, commit: str, durability: str) -> None:
    check_pattern(filename_pattern)
    if num_shards < 1:
        raise ValueError(f"a checkpoint has at least one file, not {num_shards}")
    for name, value, known in (
        ("shard_names", shard_names, ("auto", "hub")),
        ("commit", commit, ("index", "files")),
        ("durability", durability, ("full", "none")),
    ):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}")
    if os.open not in os.supports_dir_fd:
        raise StorageError("saving needs a system with POSIX files", errno=errno.ENOSYS)


def _resolved(destination: str | os.PathLike[str], num_shards: int) -> Destination:
    target = resolve(destination)
    if target.kind == "file" and num_shards != 1:
        raise ValueError(f"{target.path}: one file cannot hold {num_shards} shards; give a directory")
    return target


def _not_begun(path: str, error: OSError) -> StorageError:
    failure = write_refused("beginning the save", path, error)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        failure.message += "; the directory that holds the checkpoint must be writable"
    return failure


class LocalTransaction:
    """One save to a local filesystem; a `Transaction`. Made by `begin_local`.

    Args:
        destination: Where it goes.
        standing: What stood there when it began.
        names: What it writes, and how it is published.
        home_fd: `destination.home`, open; owned from here on.
        staging: Its staging directory there; owned from here on.
        durable: Whether anything is synced.
        relook: See `Publisher`.
    """

    def __init__(
        self,
        destination: Destination,
        standing: ExistingCheckpoint,
        names: Names,
        *,
        home_fd: int,
        staging: Staging,
        durable: bool,
        relook: Callable[[], tuple[ExistingCheckpoint, Names]] | None = None,
    ) -> None:
        self._destination, self._standing, self._names = destination, standing, names
        self._home_fd, self._staging, self._durable = home_fd, staging, durable
        self._publisher = Publisher(
            destination, standing, names, home_fd=home_fd, staging=staging, durable=durable, relook=relook
        )
        self._sinks: list[LocalSink] = []
        self._ended = False

    @property
    def path(self) -> str:
        """The destination, links followed, for messages and results."""
        return self._destination.real

    @property
    def makes_directory(self) -> bool:
        """Whether the checkpoint's directory is the save's own: there was none."""
        return self._destination.kind == "fresh"

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names that the shards will have once they are published, in the plan's order."""
        return self._names.shards

    @property
    def wants_index(self) -> bool:
        """Whether `commit` takes an index (more than one shard, or a directory that has one already)."""
        return self._names.index is not None

    def create(self, nbytes: Sequence[int]) -> Sequence[LocalSink]:
        """Create all shards, their space reserved; see `Transaction.create`."""
        shards = self._names.shards
        self._require(not self._ended, "the save has ended")
        self._require(not self._sinks and len(nbytes) == len(shards), f"{len(shards)} shards are created, once")
        single = self._destination.kind == "file"
        self._sinks = create_sinks(
            self._staging.files_fd,
            list(zip(shards, nbytes, strict=True)),
            path=self.path,
            where=[self.path if single else os.path.join(self.path, name) for name in shards],
            mode=self._standing.shard_mode,
            durable=self._durable,
        )
        return self._sinks

    def read_note(self, name: str) -> bytes | None:
        """Return the content of a small file beside the old checkpoint, None if there is none.

        Raises:
            StorageError: The system refused, or it is larger than 64 MiB.
        """
        _require_plain(name)
        self._require(not self._ended, "the save has ended")
        if self._destination.kind == "fresh":
            return None
        try:
            return read_small(self._home_fd, name, MAX_NOTE_BYTES, where=self.path)
        except StorageError:
            raise
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None  # the note's name is longer than its file's; there is none
            raise refused(f"reading {name}", self.path, error) from error

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        """Publish; see `Transaction.commit`. After any error the transaction has ended, as by `abort`.

        Raises:
            ValueError: Files are not finished, or an index is missing or not wanted; nothing was done, nor ended.
            ConcurrentSaveError: Another save changed the destination since this one began. Nothing was changed.
            CommitUncertainError: The checkpoint is in place, but perhaps not durable; or, with `commit="files"`, its
                files are being replaced, and the next save or `collect_garbage` will go on with that.
            StorageError: The operating system refused; the old checkpoint stands.
        """
        self._require(not self._ended, "the save has ended")
        self._require(bool(self._sinks) and all(sink.finished for sink in self._sinks), "not all files are finished")
        self._require((index is not None) == self.wants_index, "an index is missing" if index is None else "no index")
        for note in notes:
            _require_plain(note.name)
        try:
            self._publisher.publish(index, notes)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise write_refused("publishing the checkpoint", self.path, error) from error
        finally:
            self._end()

    def abort(self) -> None:
        """Remove everything that was staged; idempotent, never raises, and does nothing after a commit."""
        if not self._ended:
            self._end()

    def _end(self) -> None:
        self._ended = True
        for sink in self._sinks:
            sink.close()
        if self._publisher.must_stay:
            self._staging.release()
        else:
            self._staging.remove()
        calls.close(self._home_fd)

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.path}: {message}")


def _require_plain(name: str) -> None:
    if name in ("", ".", "..") or set(name) & {"/", "\\", "\0"}:
        raise ValueError(f"a note stands beside the checkpoint, so its name has no directory: {name!r}")
