"""The life of one save: its table of states, and the values that its steps make of each other."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn, get_args

import pytest
import torch

import stio
import stio.sync
from stio.device.describe import describe_tensors
from stio.errors import StorageError
from stio.limits import PAGE_BYTES
from stio.runtime import memory
from stio.saving import surroundings
from stio.saving.options import SaveOptions
from stio.saving.pending import LIFE_CYCLE, Event, PendingSave, State
from stio.saving.plan import PlannedSave, WrittenSave, plan_writes
from stio.saving.scheduler import SaveScheduler
from stio.saving.staging_pool import StagingPool
from stio.storage.commit.transaction import LocalTransaction

TENSORS = {"a": torch.arange(10.0), "b": torch.zeros(3, 2)}


def states_of(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[State]:
    """Save; return the states that the save went through."""
    states: list[State] = []
    after = PendingSave._after

    def noted(save: PendingSave, event: Event) -> None:
        states.append(save.state)
        after(save, event)
        assert LIFE_CYCLE[states[-1], event] == save.state
        states[len(states) :] = [save.state] if save.state in ("failed", "rolled back", "published") else []

    monkeypatch.setattr(PendingSave, "_after", noted)
    try:
        stio.sync.save(TENSORS, path)
    except (StorageError, ValueError):
        pass
    return states


def test_the_table_has_every_state_and_event_and_each_life_ends() -> None:
    assert {event for _, event in LIFE_CYCLE} == set(get_args(Event))
    following: dict[State, set[State]] = {state: set() for state in get_args(State)}
    for (state, _), after in LIFE_CYCLE.items():
        following[state].add(after)
    reached: set[State] = {"new"}
    while more := {after for state in reached for after in following[state]} - reached:
        reached |= more
    assert reached == set(following)
    assert {state for state in following if following[state] <= {state}} == {"published", "failed", "rolled back"}


def test_an_event_that_a_state_does_not_have_is_an_error(tmp_path: Path) -> None:
    save = PendingSave(TENSORS, tmp_path / "a", SaveOptions())
    with pytest.raises(KeyError):
        save._after("publish")
    assert save.state == "new"
    assert not (save.started or save.staged or save.done())


def test_a_save_walks_through_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert states_of(monkeypatch, tmp_path / "a") == ["new", "staging", "staged", "committing", "published"]


@pytest.mark.parametrize(
    ("step", "states"),
    [
        ("fill", ["new", "staging", "failed"]),
        ("create", ["new", "staging", "staged", "rolled back"]),
        ("commit", ["new", "staging", "staged", "committing", "rolled back"]),
        ("report", ["new", "staging", "staged", "committing", "published", "published", "published"]),
    ],
)
def test_a_save_that_fails(step: str, states: list[State], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("mine")

    owner: type = {"create": LocalTransaction, "commit": LocalTransaction, "report": PendingSave}.get(
        step, SaveScheduler
    )
    monkeypatch.setattr(owner, {"report": "_report", "fill": "_fill"}.get(step, step), fail)
    assert states_of(monkeypatch, tmp_path / "a") == states
    assert (tmp_path / "a").exists() == (step == "report")


def test_each_value_can_be_printed() -> None:
    sources = describe_tensors(TENSORS)
    plan = plan_writes(sources, PAGE_BYTES, max_shard_bytes=40)
    planned = PlannedSave(plan, plan, PAGE_BYTES, None)
    assert repr(planned) == "<PlannedSave: 2 files, 64 B, 2 blocks of 4.1 kB>"
    pool = StagingPool(None)
    pool.fit(PAGE_BYTES, memory.allocate)
    staged = SaveScheduler(plan, pool)
    assert repr(staged) == "<SaveScheduler: staging, 0 of 2 blocks written>"
    staged.stop()
    staged.join()
    written = WrittenSave(path="/out", plan=plan, names=("x", "y"), index="i", hashes={}, seconds=1.0)
    assert repr(written) == "<WrittenSave '/out': 2 files, 64 B>"


def test_what_was_written_as_a_value() -> None:
    """No file is needed to know what the index and the manifest will say."""
    plan = plan_writes(describe_tensors(TENSORS), PAGE_BYTES, max_shard_bytes=40)
    written = WrittenSave(path="/out", plan=plan, names=("x", "y"), index="i", hashes={"x": "1", "y": "2"}, seconds=1.0)
    assert written.tensor_names == ["a", "b"]
    assert {name: (state.nbytes, state.digest) for name, state in written.file_states().items()} == {
        "x": (plan.shards[0].nbytes, "1"),
        "y": (plan.shards[1].nbytes, "2"),
    }


def test_a_published_save_has_succeeded_whatever_the_report_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies around the checkpoint is looked at after the commit, when no failure is one of the save."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise StorageError("no more descriptors", path=str(tmp_path))

    monkeypatch.setattr(surroundings, "open_directory", refuse)
    for place in (tmp_path / "directory", tmp_path / "one.safetensors"):
        assert stio.sync.save({"a": torch.ones(3)}, place).total_bytes == 12
        assert stio.sync.load(place)["a"].tolist() == [1, 1, 1]
