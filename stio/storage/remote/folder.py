"""The objects below a URL that a save reads, puts and deletes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from stio.errors import CheckpointNotFoundError, StorageError
from stio.runtime.workers import WorkerPool
from stio.storage.remote.source import RemoteRoot
from stio.storage.remote.stores import require_obstore

T = TypeVar("T")

State: TypeAlias = dict[str, Any]
"""What names the state of an object in a conditional put; {}: there is none."""

NUM_IN_FLIGHT = 16
"""Requests of one object under way at one time."""

_ID_KEY = "stiosave"  # Azure allows names of variables only
"""Metadata of an object that is a checkpoint of its own: the id of the save that made it."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One object in a listing."""

    e_tag: str
    """Names its state; "": the store has no ETags."""
    changed: float
    """Time of its last change, in seconds since 1970."""


class Folder:
    """The objects below the URL of a root. Each method blocks.

    Args:
        root: The directory.
    """

    def __init__(self, root: RemoteRoot) -> None:
        self.root = root
        """See above."""
        self.path = root.path
        """The URL without secrets."""
        self.patience = root.requester.patience
        """How often requests are repeated."""
        self._upload_store: Any = None

    def key(self, name: str) -> str:
        """Return the name of an object in the store."""
        prefix = self.root.location.key
        return f"{prefix}/{name}" if prefix else name

    def read(self, name: str) -> tuple[bytes, State] | None:
        """Return the content of a small object, and its state; None without it.

        Raises:
            StioError: The store cannot be read, or has no such bucket.
        """

        def get(store: Any) -> tuple[bytes, State]:
            result = require_obstore().get(store, self.key(name))
            return bytes(result.bytes()), _state_of(result.meta)

        with suppress(CheckpointNotFoundError):
            return self._run(get, name)
        return None

    def state(self, name: str) -> State:
        """Return the state of an object, of which one byte at most is read.

        Raises:
            StioError: The store cannot be read, or has no such bucket.
        """
        return self.state_and_id(name)[0]

    def state_and_id(self, name: str) -> tuple[State, str]:
        """Return the state of an object, and the id of the save that uploaded it; "": it has none.

        Raises:
            StioError: The store cannot be read, or has no such bucket.
        """

        def get(store: Any) -> tuple[State, str]:  # not a HEAD: without a body the store cannot say what is missing
            result = require_obstore().get(store, self.key(name), options={"range": (0, 1)})
            result.bytes()
            return _state_of(result.meta), str(result.attributes.get(_ID_KEY, ""))

        try:
            return self._run(get, name)
        except CheckpointNotFoundError:
            return {}, ""
        except StorageError as error:
            if error.errno != errno.EINVAL:  # it has no first byte
                raise
        with suppress(CheckpointNotFoundError):
            return self._run(lambda store: _state_of(require_obstore().head(store, self.key(name))), name), ""
        return {}, ""

    def list(self) -> dict[str, Listed]:
        """Return the objects in it, by name.

        Raises:
            StorageError: There is no such bucket or container, or it cannot be listed.
        """
        prefix = self.root.location.key
        start = len(prefix) + 1 if prefix else 0
        try:
            found = self._run(lambda store: require_obstore().list_with_delimiter(store, prefix=prefix or None), "")
        except CheckpointNotFoundError as error:
            message = "there is no such bucket or container"
            raise StorageError(message, path=self.path, errno=errno.ENOENT) from error
        return {
            one["path"][start:]: Listed(one["e_tag"] or "", one["last_modified"].timestamp())
            for one in found["objects"]
        }

    def put_once(self, name: str, data: bytes, mode: Any) -> State:
        """Put a small object under a condition, in one attempt; return its state.

        Raises:
            Exception: What obstore raises; see `stio.storage.remote.failures`.
        """

        def put(store: Any) -> State:
            return _state_of(require_obstore().put(store, self.key(name), data, mode=mode, use_multipart=False))

        return self.root.requester.begin(put).result()

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, several at one time; those that do not exist are no error.

        Raises:
            StioError: The store refuses it.
        """
        left = iter([*names])

        def work() -> None:
            while (name := next(left, None)) is not None:  # one step: several workers call it
                with suppress(CheckpointNotFoundError):
                    self._run(partial(_delete, key=self.key(name)), name)

        WorkerPool("delete").run(work, min(len(names), NUM_IN_FLIGHT))

    def upload(self, name: str, parts: Iterator[Any], *, part_bytes: int, is_one: bool, save_id: str) -> str:
        """Upload an object of parts, and return its ETag; an error of the iterator aborts it.

        Args:
            name: Its name.
            parts: Its bytes. obstore keeps each until the store has it, or the upload ends.
            part_bytes: Size of each part but the last.
            is_one: There is only one.
            save_id: Stored with it; "": nothing.

        Raises:
            Exception: What obstore raises, or the iterator.
        """
        if self._upload_store is None:
            # obstore has no pauses that a store requests, and repeats every failure for as long.
            self._upload_store = self.root.new_store(
                num_retries=self.patience.num_attempts - 1, retry_seconds=self.patience.busy_seconds
            )
        result = require_obstore().put(
            self._upload_store,
            self.key(name),
            parts,
            attributes={_ID_KEY: save_id} if save_id else None,
            use_multipart=not is_one,
            chunk_size=part_bytes,
            max_concurrency=NUM_IN_FLIGHT,
        )
        return result["e_tag"] or ""

    def _run(self, request: Callable[[Any], T], name: str) -> T:
        path = f"{self.path}/{name}" if name else self.path
        with self.root.explained(name):
            return self.root.requester.run(request, path, work="save")


def _state_of(meta: Any) -> State:
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def _delete(store: Any, *, key: str) -> None:
    require_obstore().delete(store, key)
