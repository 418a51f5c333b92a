"""The policy of a pool: which model is loaded next, which ones are evicted for it, and which callers get theirs.

It is pure: no clock, no threads, no memory, no torch. Its owner reports what happened and carries out what `decide`
returns.

Callers of models that are not on the device are ranked by the time of their call. A step of priority counts as if the
call had come `hold_seconds` earlier, so every caller is the first one at some time. Room for the first model is made by
eviction of models without users, the least recently used first. While models in use occupy the room, they get further
users until the first caller has waited for `hold_seconds`. From then on they get none, and nothing else is loaded. So a
model serves many callers between two swaps, and each wait ends if each use ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Literal, TypeVar

State = Literal["absent", "measuring", "loading", "resident", "evicting", "updating"]
"""What happens to a model. `"measuring"`: its size is being read. `"updating"`: its weights are being replaced."""

Event = Literal[
    "measure", "measured", "load", "loaded", "failed", "cancelled", "free", "evict", "evicted", "update", "replaced"
]
"""What is decided about a model, and what became of that."""

LIFE_CYCLE: Mapping[tuple[State, Event], State] = {
    ("absent", "measure"): "measuring",
    ("measuring", "measured"): "absent",
    ("loading", "measured"): "absent",  # its files have changed since: it waits for room once more
    ("absent", "load"): "loading",
    ("loading", "loaded"): "resident",
    ("absent", "failed"): "absent",  # it does not fit
    ("measuring", "failed"): "absent",
    ("loading", "failed"): "absent",
    ("measuring", "cancelled"): "absent",
    ("loading", "cancelled"): "absent",
    ("absent", "free"): "evicting",  # the load failed, and its memory is still referenced
    ("resident", "evict"): "evicting",
    ("evicting", "evicted"): "absent",
    ("absent", "update"): "updating",
    ("resident", "update"): "updating",
    ("updating", "replaced"): "resident",  # in place
    ("updating", "evicted"): "absent",
}
"""The state of a model after an event; no other event happens in a state."""


@dataclass(eq=False, slots=True)
class ModelRequest:
    """One caller of a model, from the call until it has the model."""

    called: float
    """Time of the call, in seconds."""
    priority: int = 0
    """See above."""


@dataclass(eq=False, slots=True)
class Model:
    """A model, as the policy knows it."""

    name: str
    pinned: bool = False
    """Never evicted."""
    nbytes: int | None = None
    """Most bytes of the device that it needs, while it is loaded and later. None: not known yet."""
    state: State = "absent"
    num_users: int = 0
    """Callers that have it."""
    used: float = 0.0
    """Time of its last use."""
    calls: list[ModelRequest] = field(default_factory=list)
    """Callers that wait for it. The owner adds them, and removes those that wait no longer."""
    wants_update: bool = False
    """Its weights are to be replaced as soon as it has no users."""

    def after(self, event: Event) -> None:
        """Set the state after an event."""
        self.state = LIFE_CYCLE[self.state, event]

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that are its own now."""
        return 0 if self.state in ("absent", "measuring") else self.nbytes or 0


M = TypeVar("M", bound=Model)

Tier = Literal["device", "loading", "host", "source"]
"""Where a model is: on the device, on its way there, in host memory as a whole, or only in its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model of a pool, at one moment."""

    tier: Tier
    """Where it is."""
    nbytes: int | None
    """Bytes that it needs on the device; None: its files were not opened yet."""
    num_users: int
    """Callers that use it."""
    num_waiting: int
    """Callers that wait for it."""
    progress: float
    """How much of its load is done, from 0 to 1; 1 on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool in numbers: what it holds now, and counters since it was entered."""

    device_bytes: int = 0
    """Bytes of the device that models occupy, or that are reserved for loads under way."""
    peak_device_bytes: int = 0
    """Most such bytes at one time."""
    leftover_bytes: int = 0
    """Bytes of evicted models that are not free, since tensors are still referenced. Part of `device_bytes`."""
    host_bytes: int = 0
    """Bytes of files that are held in host memory."""
    disk_bytes: int = 0
    """Bytes of files in the `DiskCache`."""
    num_hits: int = 0
    """Uses of a model that was on the device."""
    num_waits: int = 0
    """Uses that had to wait for a load, or for the end of other uses."""
    wait_seconds: float = 0.0
    """Time of all these waits."""
    num_loads: int = 0
    """Loads to the device that succeeded."""
    num_failed: int = 0
    """Loads to the device that failed, and models that did not fit."""
    load_seconds: float = 0.0
    """Time of all loads that succeeded."""
    num_evictions: int = 0
    """Models that were removed from the device."""
    num_updates: int = 0
    """Updates that succeeded."""


@dataclass(slots=True)
class Decision(Generic[M]):
    """What the owner does next. The states of the models are set already."""

    grant: list[tuple[M, list[ModelRequest]]] = field(default_factory=list)
    """Callers that get their model. They count as its users."""
    measure: list[M] = field(default_factory=list)
    """Models whose size is to be read; see `Policy.measured` and `Policy.failed`."""
    load: list[M] = field(default_factory=list)
    """Models to load; see `Policy.loaded` and `Policy.failed`."""
    evict: list[M] = field(default_factory=list)
    """Models to remove from the device; see `Policy.evicted`."""
    cancel: list[M] = field(default_factory=list)
    """Models under way that nobody waits for any more."""
    refuse: list[M] = field(default_factory=list)
    """Models that do not fit, whatever is evicted."""
    update: list[M] = field(default_factory=list)
    """Models whose weights can be replaced now; see `Policy.updated`."""


class Policy(Generic[M]):
    """The models of a pool.

    Args:
        device_bytes: Most bytes of the device.
        hold_seconds: See above.
        max_loads: Most loads at one time.
        idle_seconds: Models that were not used for so long are evicted.
    """

    def __init__(self, device_bytes: int, *, hold_seconds: float, max_loads: int, idle_seconds: float = inf) -> None:
        self.device_bytes = device_bytes
        """See above."""
        self._hold_seconds = hold_seconds
        self._max_loads = max_loads
        self._idle_seconds = idle_seconds
        self.models: list[M] = []
        """All models."""
        self.leftover_bytes = 0
        """Memory of evicted models that is not free, since tensors are still referenced. Set by the owner."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that are in use or reserved."""
        held_bytes = self.leftover_bytes
        for model in self.models:
            held_bytes += model.held_bytes
        return held_bytes

    # What happened.

    def release(self, model: Model, now: float) -> None:
        """Remove a user."""
        model.num_users -= 1
        model.used = now

    def measured(self, model: Model, nbytes: int) -> None:
        """Set the size of a model."""
        model.after("measured")
        model.nbytes = nbytes

    def loaded(self, model: Model, now: float) -> list[ModelRequest]:
        """Set a model as loaded; return all its callers, which get it together, before anything else is decided."""
        model.after("loaded")
        return self._grant(model, now)

    def failed(self, model: Model) -> list[ModelRequest]:
        """Set a model as absent; return its callers, which get the error."""
        model.after("failed")
        calls, model.calls = model.calls, []
        return calls

    def evicted(self, model: Model) -> None:
        """Set a model as absent."""
        model.after("evicted")

    def updated(self, model: Model, *, resident: bool) -> None:
        """Set the end of an update. The size is read again unless the new weights are on the device."""
        model.wants_update = False
        model.after("replaced" if resident else "evicted")
        if not resident:
            model.nbytes = None

    # What to do.

    def decide(self, now: float, limit: int | None = None) -> Decision[M]:
        """Return what to do next.

        Args:
            now: The time, in seconds.
            limit: Most bytes of the device for now; None: `device_bytes`.
        """
        decision: Decision[M] = Decision()
        limit = self.device_bytes if limit is None else min(limit, self.device_bytes)
        closed = self._make_room(now, limit, decision)
        for model in self._idle() if self._idle_seconds < inf else ():
            if now - model.used >= self._idle_seconds:
                model.after("evict")
                decision.evict.append(model)
        for model in self.models:
            if model.state in ("loading", "measuring") and not model.calls:
                decision.cancel.append(model)
            elif model.wants_update and not model.num_users and model.state in ("absent", "resident"):
                if model.state == "absent":
                    model.nbytes = None  # that of the new weights is not known
                model.after("update")
                decision.update.append(model)
            elif model.state == "resident" and model.calls and model not in closed and not model.wants_update:
                decision.grant.append((model, self._grant(model, now)))
        return decision

    def idle_in(self, now: float) -> float | None:
        """Return the seconds until the next model is evicted that nobody uses; None if there is none."""
        idle = self._idle() if self._idle_seconds < inf else []
        return max(0.0, min(model.used for model in idle) + self._idle_seconds - now) if idle else None

    def _idle(self) -> list[M]:
        """Return the models that `idle_seconds` applies to."""
        return [model for model in self._evictable() if not model.num_users and not model.calls]

    def _make_room(self, now: float, limit: int, decision: Decision[M]) -> list[M]:
        """Decide on loads and evictions, the first caller's first; return models that get no further users now."""
        waiting = [model for model in self.models if model.calls and model.state == "absent" and not model.wants_update]
        if not waiting:
            return []
        waiting.sort(key=self._rank)  # the first caller's first
        free, coming, num_loads = limit - self.held_bytes, 0, 0
        for model in self.models:
            coming += model.held_bytes if model.state == "evicting" else 0
            num_loads += model.state == "loading"
        may_evict = True
        for model in waiting:
            if model.nbytes is None:
                model.after("measure")
                decision.measure.append(model)
                continue
            if model.nbytes > limit - self.fixed_bytes:
                decision.refuse.append(model)
                continue
            if num_loads == self._max_loads:  # until then all other models can be used
                continue
            if model.nbytes <= free:
                free -= model.nbytes
                num_loads += 1
                model.after("load")
                decision.load.append(model)
                continue
            if not may_evict:
                continue
            is_due = now - min(call.called for call in model.calls) >= self._hold_seconds
            missing = model.nbytes - free - coming
            idle = [one for one in self._evictable() if not one.num_users and (is_due or not one.calls)]
            victims = _enough(idle, missing)
            if victims is None and not is_due:
                may_evict = False  # models that fit beside it are loaded meanwhile
                continue
            closed: list[M] = []
            if victims is None:
                victims = idle
                missing -= sum(one.held_bytes for one in idle)
                closed = _enough([one for one in self._evictable() if one.num_users], missing) or []
            for one in victims:
                coming += one.held_bytes
                one.after("evict")
                decision.evict.append(one)
            if closed or is_due:
                return closed
            # What is free, and what will be, is for this model.
            coming -= model.nbytes - free
            free = 0
            num_loads += 1
        return []

    def _rank(self, model: M) -> float:
        """Return the time of the first call of a model, or an earlier one for a caller with priority."""
        return min([call.called - call.priority * self._hold_seconds for call in model.calls])

    def _evictable(self) -> list[M]:
        """Return the models that may be evicted when they have no users: without callers, least recently used first."""
        found = [one for one in self.models if one.state == "resident" and not one.pinned and not one.wants_update]
        return sorted(found, key=lambda one: (bool(one.calls), one.used))

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the device that no eviction makes free."""
        return self.leftover_bytes + sum(model.held_bytes for model in self.models if model.pinned)

    def _grant(self, model: Model, now: float) -> list[ModelRequest]:
        calls, model.calls = model.calls, []
        model.num_users += len(calls)
        model.used = now
        return calls


def _enough(models: list[M], nbytes: int) -> list[M] | None:
    """Return the first of the models that have so many bytes; None if all of them have fewer."""
    found = []
    for model in models:
        if nbytes <= 0:
            break
        found.append(model)
        nbytes -= model.held_bytes
    return found if nbytes <= 0 else None
