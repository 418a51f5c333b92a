"""The policy of a pool, alone: bounds, users, and the end of every wait, in thousands of random histories."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import pytest

from stio.serving.pool.policy import LIFE_CYCLE, Event, Model, ModelRequest, Policy, State

LOAD, EVICT, MEASURE, UPDATE, MOST_USE = 2.0, 0.5, 0.1, 1.0, 3.0


@dataclass
class History:
    """Carries out what a policy decides, in a time of its own; checks each step."""

    policy: Policy
    rng: random.Random
    failing: set[str] = field(default_factory=set)
    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    uses: dict[ModelRequest, float] = field(default_factory=dict)
    waits: dict[ModelRequest, float] = field(default_factory=dict)
    outcomes: dict[ModelRequest, str] = field(default_factory=dict)
    num_loads: int = 0
    most_waiting: int = 0
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), event))

    def add(self, name: str, nbytes: int, *, pinned: bool = False) -> Model:
        model = Model(name, pinned=pinned)
        self.sizes[name] = nbytes
        self.policy.models.append(model)
        return model

    def call(self, model: Model, use: float, *, priority: int = 0, leaves_after: float | None = None) -> ModelRequest:
        call = ModelRequest(self.now, priority)
        model.calls.append(call)
        self.uses[call] = use
        if leaves_after is not None:
            self.at(leaves_after, lambda: self.leave(model, call))
        return call

    def leave(self, model: Model, call: ModelRequest) -> None:
        if call in model.calls:
            model.calls.remove(call)
            self.outcomes[call] = "left"

    def granted(self, model: Model, calls: list[ModelRequest]) -> None:
        assert model.state == "resident"
        for call in calls:
            self.end(call, "granted")
            self.at(self.uses[call], lambda: self.policy.release(model, self.now))

    def end(self, call: ModelRequest, outcome: str) -> None:
        assert call not in self.outcomes
        self.outcomes[call] = outcome
        self.waits[call] = self.now - call.called

    def finish_load(self, model: Model) -> None:
        assert model.state == "loading"
        if model.name in self.failing and self.rng.random() < 0.5:
            self.fail(model)
        else:
            self.granted(model, self.policy.loaded(model, self.now))

    def fail(self, model: Model) -> None:
        for call in self.policy.failed(model):
            self.end(call, "failed")

    def finish_update(self, model: Model) -> None:
        assert model.state == "updating" and not model.num_users
        self.policy.updated(model, resident=model.nbytes is not None and self.rng.random() < 0.5)

    def step(self) -> None:
        decision = self.policy.decide(self.now)
        held = sum(one.held_bytes for one in self.policy.models)
        assert held <= self.policy.device_bytes
        for model, calls in decision.grant:
            self.granted(model, calls)
        for model in decision.measure:
            self.at(MEASURE, lambda model=model: self.policy.measured(model, self.sizes[model.name]))
        for model in decision.load:
            self.num_loads += 1
            self.at(LOAD, lambda model=model: self.finish_load(model))
        for model in decision.evict:
            assert not model.num_users and not model.pinned
            self.at(EVICT, lambda model=model: self.policy.evicted(model))
        for model in decision.update:
            self.at(UPDATE, lambda model=model: self.finish_update(model))
        for model in decision.refuse:
            self.fail(model)
        self.most_waiting = max(self.most_waiting, sum(len(one.calls) for one in self.policy.models))

    def run(self) -> None:
        self.step()
        for _ in range(100_000):
            if not self.events:
                break
            self.now, _, event = heapq.heappop(self.events)
            event()
            self.step()
        assert not self.events, "it does not end"
        assert not any(model.calls or model.num_users for model in self.policy.models)


@pytest.mark.slow
@pytest.mark.parametrize("part", [*range(4), *(pytest.param(k, marks=pytest.mark.slow) for k in range(4, 20))])
def test_random_histories(part: int) -> None:
    """Bounds, users and the end of every wait, in 500 histories each."""
    for seed in range(500):
        rng = random.Random(part * 1000 + seed)
        hold = rng.choice([0.0, 1.0, 5.0])
        history = History(Policy(100, hold_seconds=hold, max_loads=rng.randint(1, 3)), rng)
        models = [history.add(str(k), rng.randint(1, 60)) for k in range(rng.randint(1, 8))]
        if rng.random() < 0.3:
            models.append(history.add("pinned", 30, pinned=True))
        if rng.random() < 0.2:
            models.append(history.add("large", 101))
        history.failing = {model.name for model in models if rng.random() < 0.1}
        time = 0.0
        for _ in range(rng.randint(1, 60)):
            time += rng.expovariate(rng.choice([0.3, 3.0, 30.0]))
            model, use = rng.choice(models), rng.uniform(0, MOST_USE)
            priority = rng.choice([0, 0, 0, 1, 2])
            leaves = rng.uniform(0, 5) if rng.random() < 0.2 else None
            if rng.random() < 0.05:
                history.at(time, lambda model=model: setattr(model, "wants_update", True))
            history.at(
                time,
                partial(history.call, model, use, priority=priority, leaves_after=leaves),
            )
        history.run()
        assert len(history.outcomes) == len(history.uses)
        for call, outcome in history.outcomes.items():
            assert outcome != "failed" or call in history.waits
        # Each model ahead of a caller costs at most one hold, one use, an eviction, a load and an update.
        one = hold + MOST_USE + EVICT + LOAD + MEASURE + UPDATE
        assert max(history.waits.values(), default=0.0) <= (2 * len(models) + 2) * one + 2 * hold


def test_each_state_is_reached_and_left_for_absent() -> None:
    """And an event that the table does not have in a state is an error: nothing is set in silence."""
    following: dict[str, set[str]] = {state: set() for state in get_args(State)}
    for (state, _), after in LIFE_CYCLE.items():
        following[state].add(after)
    for start in following:
        reached, last = {start}, set[str]()
        while reached != last:
            last = set(reached)
            reached |= {after for state in last for after in following[state]}
        assert reached == set(following)
    assert {event for _, event in LIFE_CYCLE} == set(get_args(Event))
    with pytest.raises(KeyError):
        Model("m").after("loaded")


def two(hold: float, **options: int) -> tuple[History, Model, Model]:
    """Return two models of which one fits at a time."""
    history = History(Policy(100, hold_seconds=hold, max_loads=options.get("max_loads", 1)), random.Random(0))
    return history, history.add("a", 60), history.add("b", 60)


def test_alternating_callers_share_swaps() -> None:
    """Two models are called a thousand times in turn, by callers that do not wait for each other."""
    history, a, b = two(5.0)
    for k in range(1000):
        history.at(k * 0.05, lambda k=k: history.call((a, b)[k % 2], 0.1))
    history.run()
    assert set(history.outcomes.values()) == {"granted"}
    assert history.num_loads <= 50 / 5.0 * 1.5, "about one for each hold"
    assert max(history.waits.values()) <= 5.0 + 0.1 + EVICT + LOAD + 0.2


def test_nobody_starves_beside_a_model_that_is_always_in_use() -> None:
    history, a, b = two(4.0)
    for k in range(600):
        history.at(k * 0.1, lambda: history.call(a, 1.0))
    waiting: list[ModelRequest] = []
    history.at(10.0, lambda: waiting.append(history.call(b, 1.0)))
    history.run()
    assert history.waits[waiting[0]] <= 4.0 + 1.0 + EVICT + LOAD + 0.2


def test_priority_counts_as_time_of_waiting() -> None:
    history = History(Policy(60, hold_seconds=5.0, max_loads=1), random.Random(0))
    models = [history.add(name, 60) for name in "abc"]
    calls: list[ModelRequest] = []
    history.at(0.0, lambda: calls.append(history.call(models[0], 3.0)))
    history.at(1.0, lambda: calls.append(history.call(models[1], 3.0)))
    history.at(2.0, lambda: calls.append(history.call(models[2], 3.0, priority=1)))
    history.run()
    first, ordinary, urgent = (history.waits[call] + call.called for call in calls)
    assert first < urgent < ordinary


def test_the_least_recently_used_goes_first_and_pinned_ones_stay() -> None:
    history = History(Policy(100, hold_seconds=0.0, max_loads=1), random.Random(0))
    pinned, old, young, new = (history.add(name, 33, pinned=name == "p") for name in "poyn")
    for k, model in enumerate((pinned, old, young, new)):
        history.at(10.0 * k, lambda model=model: history.call(model, 0.0))
    history.run()
    assert [model.state for model in (pinned, old, young, new)] == ["resident", "absent", "resident", "resident"]


def test_room_is_made_for_as_many_models_as_are_loaded_at_one_time() -> None:
    """A model that is evicted long before the load that needs its room could answer meanwhile."""
    policy = Policy(100, hold_seconds=1.0, max_loads=1)
    old = [Model(name, nbytes=50, state="resident", used=k) for k, name in enumerate("ab")]
    new = [Model("c", nbytes=50), Model("d", nbytes=50), Model("e")]
    policy.models += old + new
    for model in new:
        model.calls.append(ModelRequest(0.0))
    decision = policy.decide(0.1)
    assert decision.evict == [old[0]] and decision.measure == [new[2]]
    assert not policy.decide(0.2).evict
    policy.evicted(old[0])
    assert policy.decide(0.3).load == [new[0]]
    assert not policy.decide(0.4).evict
    policy.loaded(new[0], 0.5)
    assert policy.decide(0.6).evict == [old[1]]


def test_a_model_with_callers_is_evicted_after_those_without() -> None:
    """When the first caller is due, also models that have callers and no users are evicted."""
    policy = Policy(100, hold_seconds=1.0, max_loads=1)
    wanted = Model("wanted", nbytes=50, state="resident", used=1.0)
    idle = Model("idle", nbytes=50, state="resident", used=2.0)
    new = Model("new", nbytes=50)
    policy.models += [wanted, idle, new]
    new.calls.append(ModelRequest(0.0))
    wanted.calls.append(ModelRequest(5.0))
    decision = policy.decide(5.0)
    assert decision.evict == [idle]
    assert [model for model, _ in decision.grant] == [wanted]


def test_what_fits_beside_a_model_that_waits_is_loaded_until_it_is_due() -> None:
    history = History(Policy(100, hold_seconds=20.0, max_loads=1), random.Random(0))
    busy, large, small = history.add("busy", 60), history.add("large", 60), history.add("small", 30)
    history.at(0.0, lambda: history.call(busy, 10.0))
    history.at(4.0, lambda: history.call(large, 0.0))
    served: list[ModelRequest] = []
    history.at(5.0, lambda: served.append(history.call(small, 0.0)))
    history.run()
    assert history.waits[served[0]] < LOAD + 0.2


def test_a_load_that_nobody_waits_for_is_cancelled() -> None:
    policy = Policy(100, hold_seconds=1.0, max_loads=1)
    model = Model("a", nbytes=10)
    policy.models.append(model)
    first, second = model.calls = [ModelRequest(0.0), ModelRequest(0.0)]
    assert policy.decide(0.0).load == [model]
    model.calls.remove(first)
    assert not policy.decide(0.1).cancel
    model.calls.remove(second)
    assert policy.decide(0.2).cancel == [model]
    assert policy.failed(model) == []


def test_a_smaller_limit_evicts_and_refuses() -> None:
    policy = Policy(100, hold_seconds=1.0, max_loads=1)
    a, b = Model("a", nbytes=40, state="resident"), Model("b", nbytes=40)
    policy.models += [a, b]
    b.calls.append(ModelRequest(0.0))
    assert policy.decide(0.0, 60).evict == [a]
    policy.evicted(a)
    assert policy.decide(0.0, 30).refuse == [b]
    policy.leftover_bytes = 70
    assert policy.decide(0.0).refuse == [b]
    policy.leftover_bytes = 0
    assert policy.decide(0.0).load == [b]


def test_an_update_waits_for_users_and_callers_wait_for_it() -> None:
    policy = Policy(100, hold_seconds=1.0, max_loads=1)
    model = Model("a", nbytes=40, state="resident", num_users=1, wants_update=True)
    policy.models.append(model)
    model.calls.append(ModelRequest(0.0))
    decision = policy.decide(0.0)
    assert not decision.grant and not decision.update
    policy.release(model, 1.0)
    assert policy.decide(1.0).update == [model]
    assert not policy.decide(1.0).grant
    policy.updated(model, resident=True)
    assert len(policy.decide(2.0).grant) == 1
