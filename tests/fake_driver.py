"""A driver for the engine, in Python, whose copies are made when their event passes: a late copy shows each mistake."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeDevice
from support import eventually

import stio.sync
from stio import native
from stio.device.cuda import DeviceRing

_INT, _VOID, _SIZE = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_EVENT = ctypes.CFUNCTYPE(_INT, _VOID)
NOT_READY, REFUSED, FAILED = 600, 700, 719


class _Table(ctypes.Structure):
    """`stio_driver` of engine.h."""

    _fields_ = (
        ("make_current", ctypes.CFUNCTYPE(_INT, _VOID)),
        ("copy", ctypes.CFUNCTYPE(_INT, ctypes.c_uint64, _VOID, _SIZE, _VOID)),
        ("copy_to_host", ctypes.CFUNCTYPE(_INT, _VOID, ctypes.c_uint64, _SIZE, _VOID)),
        ("copy_on_device", ctypes.CFUNCTYPE(_INT, ctypes.c_uint64, ctypes.c_uint64, _SIZE, _VOID)),
        ("event_create", ctypes.CFUNCTYPE(_INT, ctypes.POINTER(_VOID), ctypes.c_uint)),
        ("event_record", ctypes.CFUNCTYPE(_INT, _VOID, _VOID)),
        ("event_query", _EVENT),
        ("event_destroy", _EVENT),
        ("pin", ctypes.CFUNCTYPE(_INT, _VOID, _SIZE, ctypes.c_uint)),
        ("unpin", ctypes.CFUNCTYPE(_INT, _VOID)),
        ("error_text", ctypes.CFUNCTYPE(_INT, _INT, ctypes.POINTER(ctypes.c_char_p))),
        ("exchange_capture_mode", ctypes.CFUNCTYPE(_INT, ctypes.POINTER(_INT))),
        ("not_ready", _INT),
    )


_tables: list[_Table] = []  # a ring gives back its memory, by the driver, after its object is gone


class FakeDriver:
    """A driver of a device on CPU memory.

    Args:
        manual: Events pass only after `go` is set.
        refuse_copy: Number of the copy, from 1, that is refused.
        fail_event: Number of the recorded event, from 1, whose copies are not made, and which reports it.
        refuse_pin: Number of the pinning, from 1, from which on memory is not pinned; 0: none.
        refuse_unpin: Memory stays pinned.
        context: The device's. A thread of the engine makes it the current one only if another one is.
    """

    def __init__(
        self,
        *,
        manual: bool = False,
        refuse_copy: int = 0,
        fail_event: int = 0,
        refuse_pin: int = 0,
        refuse_unpin: bool = False,
        context: int = 1,
    ) -> None:
        self._context = context
        self.go = threading.Event()
        """Set: events pass."""
        if not manual:
            self.go.set()
        self.num_copies = 0
        """Copies that were accepted, and the refused one."""
        self.capture_modes: list[tuple[int, int]] = []
        """Threads that have set how they may act beside a capture of a graph, and the mode."""
        self.num_recorded = 0
        """Events that were recorded."""
        self.pinned_bytes = 0
        """Memory that is pinned now."""
        self.pinned: list[int] = []
        """Sizes that were pinned, one after the other."""
        self.num_pending = 0
        """Copies that were queued and are not made."""
        self._refuse_copy, self._fail_event = refuse_copy, fail_event
        self._refuse_pin, self._refuse_unpin = refuse_pin, refuse_unpin
        self._lock = threading.Lock()
        self._queued: list[tuple[int, int, int] | None] = []  # the stream: copies, and None for one that is made
        self._events: dict[int, tuple[int, bool]] = {}  # place in the stream, and whether it fails
        self._num_events = 0
        self._pins: dict[int, int] = {}
        self._texts = [ctypes.c_char_p(b"as the test asked")]
        self._table = _Table(
            *(
                kind(getattr(self, f"_{name}"))  # type: ignore[operator]
                for name, kind in _Table._fields_[:-1]
            ),
            NOT_READY,
        )
        _tables.append(self._table)

    @property
    def driver(self) -> native.Driver:
        """What a ring takes."""
        return native.Driver(ctypes.addressof(self._table), self._context)

    def wait_for_events(self, count: int) -> None:
        """Wait until so many events are recorded."""
        assert eventually(lambda: self.num_recorded >= count), self.num_recorded

    def _make_current(self, context: int) -> int:
        return 0

    def _copy(self, target: int, source: int, nbytes: int, stream: int | None) -> int:
        with self._lock:
            self.num_copies += 1
            if self.num_copies == self._refuse_copy:
                return REFUSED
            self._queued.append((target, source, nbytes))
            self.num_pending += 1
        return 0

    _copy_to_host = _copy_on_device = _copy

    def _event_create(self, event: Any, flags: int) -> int:
        with self._lock:
            self._num_events += 1
            event[0] = self._num_events
        return 0

    def _event_record(self, event: int, stream: int | None) -> int:
        with self._lock:
            self.num_recorded += 1
            self._events[event] = len(self._queued), self.num_recorded == self._fail_event
        return 0

    def _event_query(self, event: int) -> int:
        if not self.go.is_set():
            return NOT_READY
        with self._lock:
            place, fails = self._events.get(event, (0, False))
            for k, copy in enumerate(self._queued[:place]):
                if copy is None:
                    continue
                target, source, nbytes = copy
                if not fails:
                    ctypes.memmove(target, source, nbytes)
                ctypes.memset(source, 0xCB, nbytes)
                self.num_pending -= 1
                self._queued[k] = None
        return FAILED if fails else 0

    def _exchange_capture_mode(self, mode: Any) -> int:
        self.capture_modes.append((threading.get_ident(), mode[0]))
        return 0

    def _event_destroy(self, event: int) -> int:
        return 0

    def _pin(self, address: int, nbytes: int, flags: int) -> int:
        if self._refuse_pin and len(self.pinned) + 1 >= self._refuse_pin:
            return REFUSED
        with self._lock:
            self.pinned.append(nbytes)
            self._pins[address] = nbytes
            self.pinned_bytes += nbytes
        return 0

    def _unpin(self, address: int) -> int:
        if self._refuse_unpin:
            return REFUSED
        with self._lock:
            self.pinned_bytes -= self._pins.pop(address)
        return 0

    def _error_text(self, code: int, text: Any) -> int:
        text[0] = self._texts[0]
        return 0


class Place:
    """A fake device to which the engine copies by a fake driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **faults: Any) -> None:
        self.driver = FakeDriver(**faults)
        self.device = FakeDevice()
        self.ring = DeviceRing(self.device.device, self.driver.driver, object(), 0)
        monkeypatch.setattr(DeviceRing, "of", lambda _: self.ring)

    def load(self, source: Path, **options: Any) -> dict[str, torch.Tensor]:
        """Load to the device."""
        return stio.sync.load(source, device=self.device, **options)

    def require_freed(self, *, num_copies: int = 0) -> None:
        """Require that the device holds nothing, that nothing is queued, and that it made so many copies itself."""

        def is_freed() -> bool:
            gc.collect()
            return not self.device.used_bytes

        assert eventually(is_freed), self.device.used_bytes
        assert (self.driver.num_pending, self.device.num_copies) == (0, num_copies)
