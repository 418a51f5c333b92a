"""The processes that do one thing together: they learn of each other's failures, and exchange small values.

The values are in the store of the process group, over a connection of their own: what other threads wait for in the
store does not delay them, and no collective call is needed. One thread of each rank makes all requests to the store: it
gives a sign of life, looks whether a rank has failed, and fetches what its own rank waits for. Another thread, the
*watcher*, ends the wait if the store does not answer.

What is received is plain data of one expected type (`decoded`). Nothing of it is executed, and anything else is an
error. So errors are sent by class and text (`_SentError`), and made anew of classes that all ranks have.

The first failure of all ranks is the one that all others raise. A rank that gives no sign of life for `timeout` seconds
counts as failed. The first rank judges the others by their signs, and they judge the first one. If that one
has the store, its end closes the store, which all notice at once.

Ranks make their objects in the same order: the number of an object is a part of its keys. It counts from the start of
the group, and a count of such starts is in the store: after all groups were destroyed, a rank may go on in a new group
with one that has just begun. Objects that are made on threads of others, in any order, have a key that one rank has
chosen. So each call on all ranks has to be the same one; a load beside a save is an error on all of them.
"""

from __future__ import annotations

import builtins
import hashlib
import itertools
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import isfinite
from threading import TIMEOUT_MAX
from types import TracebackType
from typing import Any, Self, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from stio import clock, errors
from stio.errors import ClosedError, RankError, StioError, listed, printable
from stio.process import Condition, new_lock
from stio.runtime import Cancelled, Notifier, Operation, copy_of, runs_blocking, start_thread
from stio.text import log

RANK_TIMEOUT_SECONDS = 120.0
"""Default of `rank_timeout=`."""

_LEAVE_SECONDS = 1.0
"""Longest time that the first rank waits until the others have read the last values: its end may close the store."""

_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.1
"""Seconds between two looks into the store: while a value is waited for, and otherwise."""

_MOST_IDLE_SECONDS = 60.0
"""After which a connection is not used again: a firewall may have ended it, and the first request would wait."""

_KEPT_ROUNDS = 8
"""Number of objects whose keys are kept: a rank that is late still finds the failure of an older one."""

_MAX_PART_BYTES = 4 << 20
"""Longest part of a value: torch's store closes a connection over which a value of more than 8 MiB comes."""

_NUMBER_BYTES = 2
"""A value begins with the number of its parts."""

_MAX_CHARACTERS = 4096
"""What is sent of a text of an error."""
_MAX_ERROR_BYTES = 1 << 20
"""Longest error that is sent with its arguments and fields; of a longer one only the text is."""

_Plain: TypeAlias = bool | int | float | str | None


@dataclass(slots=True, eq=False)
class _Request:
    """Keys whose values a rank waits for; `values` is set when all are there."""

    keys: list[str]
    values: list[bytes] | None = None


class _SentError(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """An error as plain data."""

    kind: str
    """Name of the class."""
    text: str
    """What the error shows, for ranks that do not know the class."""
    arguments: list[_Plain] | None = None
    """What makes an error of a class of stio or Python; None if that is no plain data."""
    fields: dict[str, _Plain | list[int]] = {}
    """The same, by name."""

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return an error in the form that is sent."""
        sent = cls(type(error).__name__, _text_of(error))
        with suppress(Exception):  # the class may be the program's own
            made = msgspec.structs.replace(sent)
            if isinstance(error, StioError):
                made.kind = next(kind.__name__ for kind in type(error).__mro__ if kind in _KNOWN.values())
                _, (_, message, fields) = error.__reduce__()
                made.arguments = [_cut(message)]
                made.fields = {name: value if name == "ranks" else _plain(value) for name, value in fields.items()}
            elif type(error) in _KNOWN.values():
                arguments = [*error.args, *([error.filename] if isinstance(error, OSError) and error.filename else [])]
                if all(map(_is_plain, arguments)):
                    made.arguments = [_plain(one) for one in arguments]
            data = msgspec.json.encode(made)  # raises for what has no text, such as a number of 5,000 digits
            if len(data) <= _MAX_ERROR_BYTES:
                return msgspec.json.decode(data, type=cls)  # it is what a receiver accepts
        return sent

    def error(self, rank: int) -> Exception:
        """Return the error. Of a class that is not known here, or that takes other arguments, return a `RankError`.

        Args:
            rank: The rank that has sent it.
        """
        with suppress(Exception):
            if self.arguments is not None:
                error = _KNOWN[self.kind](*self.arguments, **self.fields)
                str(error)  # raises if a field is of another type
                return error
        return RankError(f"{printable(self.kind)}: {self.text}", ranks=(rank,))


_KNOWN: dict[str, Callable[..., Exception]] = {
    name: kind
    for name, kind in [*vars(builtins).items(), *((name, getattr(errors, name)) for name in errors.__all__)]
    if isinstance(kind, type) and issubclass(kind, Exception)
}
"""Classes of errors that all ranks have, by name."""


class _RankFailure(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What a rank reports of its own failure, or of ranks that are silent."""

    told_by: int
    ranks: tuple[int, ...]
    text: str
    error: _SentError | None = None


@dataclass(slots=True)
class _Sign:
    """The last sign of life of a rank, and when it was seen first."""

    value: bytes = b""
    seen: float = 0.0


@dataclass(slots=True)
class _GroupState:
    """State that belongs to a process group, as long as that exists."""

    numbers: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of the objects that are made; each comes once, also on several threads."""
    start: int = 0
    """How many groups of these ranks and of this name had begun in the store, with this one; 0: not known yet."""
    lock: Any = field(default_factory=new_lock)
    """Held while `start` is made."""
    old_keys: deque[list[str]] = field(default_factory=deque)
    """The keys that this rank has set for each object that has ended."""
    idle: list[tuple[float, Store]] = field(default_factory=list)
    """Connections to the store that no object uses, with the time at which that began."""
    groups: list[tuple[str, Any]] = field(default_factory=list)
    """Gloo groups of `RankTransfer` that are connected and not in use, with their names."""


_groups: MutableMapping[dist.ProcessGroup, _GroupState] = WeakKeyDictionary()


class Ranks:
    """The ranks of a process group that do one thing together. Enter it by `async with`, on all ranks.

    When the block is left by an error, all other ranks raise `RankError`. Before the torch process group is initialised
    there is one rank.

    Args:
        process_group: The ranks; None: those of the default group.
        about: What they do, for messages.
        timeout: Seconds without a sign of life of a rank, after which it counts as failed.
        key: A text that all ranks have, and that was never used before, where they do not make their objects in the
            same order. None: a number, in the order in which objects without a key are made.
        is_alone: Whether this rank does it without the others.

    Raises:
        TypeError: The timeout is no number.
        ValueError: It is out of range, or this process is not a member of the group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        about: str,
        timeout: float = RANK_TIMEOUT_SECONDS,
        key: str | None = None,
        is_alone: bool = False,
    ) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"rank_timeout= takes a number of seconds, not {timeout!r}")
        if not 0 < timeout <= TIMEOUT_MAX:  # also False for NaN
            raise ValueError(f"rank_timeout= takes a positive number of seconds, at most {TIMEOUT_MAX:.0f}")
        self._about = about
        self.timeout = timeout
        """See above."""
        self.rank, self.num_ranks = 0, 1
        self.groups: list[tuple[str, Any]] = []
        """Connected groups that no transfer uses, with their names; see `connect`."""
        self._store: Store | None = None
        self._prefix = ""
        self.key = key or ""
        """See above."""
        if dist.is_initialized() and not is_alone:
            self.rank, self.num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
            if self.rank < 0:
                raise ValueError("this process is not a member of process_group=")
        elif not is_alone:
            _warn_without_group(about)
        if self.num_ranks > 1:
            self._store, group = _store_of(process_group)
            self._group = _groups.setdefault(group, _GroupState())
            self.key = key or str(next(self._group.numbers))
            self.groups = self._group.groups
        self.failure: RankError | None = None
        """The first failure of another rank, once it is known."""
        self.has_begun = False
        """Whether the block of this object was entered."""
        self._cancels: list[Callable[[], None]] = []
        self._requests: list[_Request] = []
        self._posts: deque[Callable[[Store], object]] = deque()  # what is to be set in the store
        self._keys: list[str] = []  # that this rank has set
        self._leaving = False
        self._interrupted = False
        self._error: BaseException | None = None
        self._changed = Condition()
        self._notifier = Notifier()
        self._watcher: Operation[None] = Operation(self._watch, name="ranks", about=about, notifier=self._notifier)
        self._signs = {other: _Sign() for other in (range(1, self.num_ranks) if self.rank == 0 else (0,))}
        self.sign_seconds = min(0.5, self.timeout / 8) * max(1.0, self.num_ranks / 250)
        """Seconds between two signs of life of a rank, which are its values of the name "sign"."""
        self._next_sign, self._num_signs = 0.0, 0
        self._looked = clock.monotonic()  # when the store has answered last
        self._served = False  # whether the thread of the requests has ended

    def bind(self, operation: Operation[Any]) -> None:
        """Cancel an operation when another rank has failed, at once if one has; its cancel ends all waits of this rank.

        The operation may then raise `ClosedError` or `Cancelled`: on leaving the block `RankError` takes its place.
        """
        self._watcher.exit_patience = operation.exit_patience
        operation.on_cancel(self.interrupt)
        self._cancels.append(operation.cancel)
        if self.failure is not None:
            operation.cancel()

    def share(self, name: str, value: object = b"") -> None:
        """Give the other ranks a value of plain data, once for each name; returns at once."""
        if self._store is not None:
            data, key = msgspec.msgpack.encode(value), f"{name}/{self.rank}"
            parts = [data[at : at + _MAX_PART_BYTES] for at in range(0, len(data), _MAX_PART_BYTES)]
            # The first part comes last, with the number of all: a rank that has it finds the others.
            for k, part in enumerate(parts[1:], 1):
                self._posts.append(partial(self._set, key=f"{key}/{k}", value=part))
            first = len(parts).to_bytes(_NUMBER_BYTES, "big") + parts[0]
            self._posts.append(partial(self._set, key=key, value=first))
            self._changed.wake()

    async def fetch(self, name: str, of: int = 0, *, kind: Any = bytes) -> Any:
        """Wait for a value that a rank shares.

        Args:
            name: The name of the value.
            of: The rank.
            kind: The type that the value must have.

        Raises:
            RankError: A rank has failed, or has shared something else.
            Cancelled: This rank was interrupted.
        """
        (value,) = await self._values([f"{name}/{of}"])
        return decoded(value, kind, rank=of)

    async def arrive(self, name: str, value: object = b"", *, kind: Any = bytes) -> list[Any]:
        """Share a value, and wait until all ranks have; return the values, the first rank's first.

        After an error other ranks may have seen the value.

        Args:
            name: The name of the value.
            value: The value of this rank.
            kind: The type that the values must have.

        Raises:
            RankError: A rank has failed, or has shared something else.
            Cancelled: This rank was interrupted.
        """
        if self._store is None:
            return [value]
        self.share(name, value)
        values = await self._values([f"{name}/{rank}" for rank in range(self.num_ranks)])
        return [decoded(data, kind, rank=rank) for rank, data in enumerate(values)]

    async def _values(self, keys: list[str]) -> list[bytes]:
        request = _Request(keys)
        self._requests.append(request)
        self._changed.wake()
        try:
            await self.wait_until(lambda: request.values is not None)
        finally:
            with suppress(ValueError):  # it was answered
                self._requests.remove(request)
        return request.values or []

    async def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, which is looked at once a second.

        Raises:
            RankError: A rank has failed. This comes before `ready()`: a rank that is late finds the values of ranks
                that have given up.
            Cancelled: This rank was interrupted.
            ClosedError: The block of this object was left.
        """
        await self._watcher.wait_until(lambda: ready() or self.failure is not None or self._interrupted)
        if self.failure is not None:
            raise copy_of(self.failure)
        if ready():
            return
        if not self._watcher.done:
            raise Cancelled
        self._watcher.outcome()  # raises why the watcher ended
        raise ClosedError(f"the {self._about} has ended")

    def connect(self) -> tuple[str, Any]:
        """Return a new `ProcessGroupGloo` of these ranks, connected to all of them, and its unique name; blocks.

        It is none of the groups of the program: those are made in one order on all ranks, and this one on any thread.
        A call in it waits `timeout` for the others. Its connections are closed with the last reference to it.
        """
        assert self._store is not None
        store = PrefixStore(f"{self._prefix}/gloo", _own_connection(self._store))
        limit = timedelta(seconds=self.timeout)
        return f"{self._prefix} {self.timeout}", dist.ProcessGroupGloo(store, self.rank, self.num_ranks, limit)

    def interrupt(self) -> None:
        """End all waits of this rank, which was cancelled. Takes no lock; callable from any thread."""
        self._interrupted = True
        self._notifier.notify()

    def report_error(self, error: BaseException) -> None:
        """Report an error of this rank to all, before it leaves the block; returns at once."""
        self._posts.append(partial(self._tell, failure=_described(self.rank, self._about, error)))
        self._changed.wake()

    @asynccontextmanager
    async def reports(self) -> AsyncIterator[None]:
        """Return a block for what comes before that of this object; an error in it is raised on the other ranks too."""
        try:
            yield
        except BaseException as error:
            if not self.has_begun:
                async with self:
                    raise error
            raise

    async def __aenter__(self) -> Self:
        self.has_begun = True
        if self._store is not None:
            self._looked = now = clock.monotonic()
            for sign in self._signs.values():  # this object may have been made long ago
                sign.seen = now
            self._watcher.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        self._error, self._leaving = error, True
        self._changed.wake()
        if kind is GeneratorExit and not runs_blocking():
            return  # a coroutine that is closed must not wait
        await self._watcher.ended()
        self._error = None  # it refers to this frame
        if self.failure is not None and isinstance(error, ClosedError | Cancelled):
            raise copy_of(self.failure) from self.failure.__cause__

    # On the watcher's threads.

    def _watch(self, operation: Operation[None]) -> None:
        """Start the thread that makes the requests, and wait for its end, or until the store does not answer."""
        operation.on_cancel(self._changed.wake)
        start_thread(partial(self._serve, operation), name="ranks")
        with self._changed:
            while not self._served and (left := self._looked + self.timeout - clock.monotonic()) > 0:
                self._changed.wait(left)
        if not self._served:  # its thread is left behind, in a call without a time limit; it has no buffers
            self._fail(
                RankError(f"the store of the process group did not answer for {self.timeout:g} s (rank_timeout=)")
            )

    def _serve(self, operation: Operation[None]) -> None:
        assert self._store is not None
        try:
            connection = self._connect()
            self._prefix = f"stio/{self._group_start(connection)}/{self.key}"
            store = PrefixStore(self._prefix, connection)
            pause = _MIN_PAUSE
            while not self._leaving and not operation.cancelled:
                found = self._look(store)
                self._looked = clock.monotonic()
                pause = _MIN_PAUSE if found or not self._requests else min(2 * pause, _MAX_PAUSE)
                with self._changed:
                    if not (self._leaving or self._posts or operation.cancelled):
                        self._changed.wait(pause if self._requests else _MAX_PAUSE)
            self._leave(store)
            self._forget_old_keys(connection)
            self._group.idle.append((clock.monotonic(), connection))
        except RankError as error:
            self._fail(error)
        except Exception as error:  # DistError and its subclasses; nothing may be raised on this thread
            reason = printable(str(error).partition("\n")[0])
            text = f"the store of the process group does not answer: the rank that holds it may have ended ({reason})"
            self._fail(RankError(text), error)
        finally:
            self._served = True
            self._changed.wake()

    def _connect(self) -> Store:
        """Return a connection that no other object of this process uses.

        A new one asks for the name of the store's address, which took 5 s where the name server was slow.
        """
        assert self._store is not None
        with suppress(IndexError, RuntimeError):  # none is there, or it is broken
            since, connection = self._group.idle.pop()
            if clock.monotonic() - since < _MOST_IDLE_SECONDS:
                connection.check(["stio/start"])
                return connection
        return _own_connection(self._store)

    def _look(self, store: Store) -> bool:
        """Make the requests that are due; return whether a value was set or found."""
        if clock.monotonic() >= self._next_sign:  # first: it shows that this rank has begun
            self._give_sign(store)
        found = self._post(store)
        if self.failure is None and store.check(["failed"]):
            self._read_failure(store.get("failed"))
        for request in self._requests.copy():
            if store.check(request.keys):
                request.values = [_value(store, key) for key in request.keys]
                with suppress(ValueError):  # nothing waits for it any more
                    self._requests.remove(request)
                self._notifier.notify()
                found = True
        return found

    def _post(self, store: Store) -> bool:
        """Set what is to be set; return whether that was anything."""
        found = bool(self._posts)
        while self._posts:
            self._posts.popleft()(store)
        return found

    def _give_sign(self, store: Store) -> None:
        """Give a sign of life, and judge those of other ranks."""
        now = clock.monotonic()
        self._next_sign = now + self.sign_seconds
        self._num_signs += 1
        self._set(store, f"sign/{self.rank}", f"{self._num_signs} {self._about}".encode())
        silent = []
        for other, sign in self._signs.items():
            key = f"sign/{other}"
            value = store.get(key) if store.check([key]) else b""
            if value != sign.value:
                if not sign.value:
                    self._require_same_call(store, other, printable(value.partition(b" ")[2].decode(errors="replace")))
                sign.value, sign.seen = value, now
            elif now - sign.seen > self.timeout and not store.check([f"left/{other}"]):
                silent.append(other)
        if silent and self.failure is None:
            has_begun = any(self._signs[other].value for other in silent)
            what = "gave no sign of life for" if has_begun else f"did not begin the {self._about} within"
            who = "rank" if len(silent) == 1 else "ranks"
            text = f"{who} {listed(silent)} {what} {self.timeout:g} s (rank_timeout=)"
            self._tell(store, _RankFailure(self.rank, tuple(silent), text))

    def _require_same_call(self, store: Store, other: int, about: str) -> None:
        """Report a failure if another rank has begun something else: each would wait for the other one for ever."""
        if about != self._about:
            text = (
                f"rank {self.rank} has begun a {self._about}, and rank {other} a {about}; all ranks of a process group "
                "must make the same calls in the same order"
            )
            self._tell(store, _RankFailure(self.rank, tuple(sorted((self.rank, other))), text))

    def _tell(self, store: Store, failure: _RankFailure) -> None:
        """Report a failure to all ranks; the first one counts."""
        value = msgspec.json.encode(failure)
        first = store.compare_set("failed", "", value.decode())
        self._keys.append("failed")
        self._read_failure(bytes(first))

    def _read_failure(self, value: bytes) -> None:
        failure: _RankFailure = decoded(value, _RankFailure, decode=msgspec.json.decode)
        if failure.told_by == self.rank and failure.ranks == (self.rank,):
            return
        cause = None if failure.error is None else failure.error.error(failure.told_by)
        self._fail(RankError(failure.text, ranks=failure.ranks), cause)

    def _fail(self, failure: RankError, cause: BaseException | None = None) -> None:
        if self._served or self.failure is not None:
            return
        failure.__cause__ = cause
        self.failure = failure
        for cancel in self._cancels.copy():
            cancel()
        self._notifier.notify()

    def _leave(self, store: Store) -> None:
        """Set what is left to set, report a failure of this rank, and let the others read it."""
        self._post(store)
        error = self._error
        if error is None and not self._leaving:
            error = Cancelled()
        is_own = error is not None and not (
            self.failure is not None and isinstance(error, ClosedError | Cancelled | RankError)
        )
        if error is not None and is_own:
            self._tell(store, _described(self.rank, self._about, error))
        self._set(store, f"left/{self.rank}", b"")
        if self.rank == 0:
            now = clock.monotonic()
            end = now + min(_LEAVE_SECONDS, self.timeout / 4)
            dead = () if self.failure is None else self.failure.ranks
            others = [  # of a host that is cut off, one rank counts as failed first
                f"left/{other}"
                for other, sign in self._signs.items()
                if other not in dead and now - sign.seen < self.timeout / 2
            ]
            while others and not store.check(others) and clock.monotonic() < end:
                self._looked = clock.monotonic()
                clock.sleep(_MIN_PAUSE)

    def _group_start(self, connection: Store) -> int:
        """Return how many groups of these ranks and of this name have begun in the store."""
        with self._group.lock:
            self._group.start = self._group.start or connection.add(f"stio/start/{self.rank}", 1)
            return self._group.start

    def _forget_old_keys(self, connection: Store) -> None:
        old = self._group.old_keys
        old.append([f"{self._prefix}/{key}" for key in self._keys])
        while len(old) > _KEPT_ROUNDS:
            for key in old.popleft():
                connection.delete_key(key)

    def _set(self, store: Store, key: str, value: bytes) -> None:
        store.set(key, value)  # type: ignore[arg-type]  # bytes are allowed, and the stub does not say so
        if key not in self._keys:
            self._keys.append(key)


def _warn_without_group(about: str) -> None:
    """Log a warning if torchrun has started this process with others, and there is no process group."""
    num_started = os.environ.get("WORLD_SIZE", "1")
    if dist.is_torchelastic_launched() and num_started != "1":
        text = "the %s is of this process alone: torchrun has started %s, and there is no process group; call %s first"
        log(logging.WARNING, text, about, printable(num_started), "torch.distributed.init_process_group")


def _store_of(process_group: dist.ProcessGroup | None) -> tuple[Store, dist.ProcessGroup]:
    """Return the store of a process group, in which keys of other groups do not occur, and the group.

    A group that is made after all groups were destroyed may have the name of an older one of other ranks.
    """
    group = process_group or distributed_c10d._get_default_group()
    members = hashlib.sha256(str(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]
    # `ProcessGroup.get_group_store` is not in all versions, and for some backends it has no store.
    return PrefixStore(f"{group.group_name}/{members}", distributed_c10d._get_default_store()), group


def _value(store: Store, key: str) -> bytes:
    """Return a value that is in the store, from its parts."""
    first = store.get(key)
    others = [f"{key}/{k}" for k in range(1, int.from_bytes(first[:_NUMBER_BYTES], "big"))]
    if others and not store.check(others):
        others = []  # no rank of stio has sent this, and it cannot be decoded
    return first[_NUMBER_BYTES:] + b"".join(map(store.get, others))


def _own_connection(store: Store) -> Store:
    """Return a store over a connection of its own, where torch has that (2.8): a call waits for calls of others."""
    clone: Callable[[], Any] | None = getattr(store, "clone", None)
    return store if clone is None else clone()


def _described(rank: int, about: str, error: BaseException) -> _RankFailure:
    kind = type(error).__name__
    if isinstance(error, Exception):
        text = f"the {about} failed on rank {rank}: {kind}: {_text_of(error)}"
    else:
        text = f"the {about} was cancelled on rank {rank} ({kind})"
    return _RankFailure(rank, (rank,), text, _SentError.of(error) if isinstance(error, Exception) else None)


def decoded(
    data: bytes, kind: Any, *, rank: int | None = None, decode: Callable[..., Any] = msgspec.msgpack.decode
) -> Any:
    """Return what a rank has sent: plain data of the type that is expected. Nothing of it is executed.

    Args:
        data: What was received.
        kind: The type.
        rank: The rank, if it is known.
        decode: How it was encoded.

    Raises:
        RankError: It is something else.
    """
    sender, ranks = ("a rank", ()) if rank is None else (f"rank {rank}", (rank,))
    try:
        return decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = printable(str(error))
        text = f"{sender} has sent no valid message ({reason}); do all ranks run the same stio?"
        raise RankError(text, ranks=ranks) from error


def _plain(value: object) -> Any:
    """Return a field of an error in the form that is sent: of an object the text that the error shows of it."""
    if type(value) is str:
        return _cut(value)
    return value if _is_plain(value) else _cut(repr(value))


def _is_plain(value: object) -> bool:
    """Return whether a value arrives as it is; one of a subclass, or NaN, does not."""
    return value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value))


def _text_of(error: Exception) -> str:
    """Return the text of an error in a form that can be sent."""
    try:
        return _cut(str(error))
    except Exception as own:  # the class may be the program's own
        return f"its text cannot be made ({type(own).__name__})"


def _cut(text: str) -> str:
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}... ({len(text):,} characters)"
    return text.encode(errors="backslashreplace").decode()  # paths may have surrogates
