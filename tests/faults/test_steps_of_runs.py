"""Faults 410, 411, 415, 433, 451 to 453, 458 and 464: which steps a run keeps, deletes, resumes from and warns of."""

from __future__ import annotations

import copy
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import stio
from stio import sync

ACTOR, CRITIC = "step-{}/actor", "step-{}/critic"


def run(directory: Path, steps: list[int], *names: str, **keywords: Any) -> None:
    """Save steps as one process of a training does; each value is that of the step."""
    with sync.Saver(durability="none", **keywords) as saver:
        for step in steps:
            for name in names or ("step-{}",):
                saver.save({"a": torch.full((3,), float(step))}, directory / name.format(step)).result()


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def steps_in(directory: Path) -> list[str]:
    return sorted((path.name for path in directory.iterdir()), key=lambda name: (len(name), name))


# 410: a run that went back.


@pytest.mark.parametrize("same_process", [True, False])
@pytest.mark.parametrize("names", [("step-{}",), ("step-{}.safetensors",), (ACTOR, CRITIC)], ids=str)
def test_c410_each_save_below_a_step_is_told(
    tmp_path: Path, names: tuple[str, ...], same_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = [10, 20, 30, 40], [25, 30, 45, 50]
    if same_process:
        run(tmp_path, first + second, *names)
    else:
        run(tmp_path, first, *names)
        run(tmp_path, second, *names)
    told = lines(caplog)
    assert ["step 25," in told[0], "step 30," in told[1], len(told)] == [True, True, 2]
    assert "30, 40. " in told[0] and "already: 40. " in told[1]
    assert all(str(tmp_path) in line and "drop_higher=" in line for line in told)


@pytest.mark.parametrize("same_process", [True, False])
@pytest.mark.parametrize("names", [("step-{}",), ("step-{}.safetensors",), (ACTOR, CRITIC)], ids=str)
def test_c410_the_higher_steps_are_dropped(
    tmp_path: Path, names: tuple[str, ...], same_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stio")
    keywords = {"keep_last": 9, "keep_every": 20, "drop_higher": True}
    if same_process:
        run(tmp_path, [10, 20, 30, 40, 25], *names, **keywords)
    else:
        run(tmp_path, [10, 20, 30, 40], *names)
        run(tmp_path, [25], *names, adopt=tmp_path, **keywords)
    assert stio.latest(tmp_path) == str(tmp_path / names[0].format(25).partition("/")[0])
    assert [name.removesuffix(".safetensors") for name in steps_in(tmp_path)] == ["step-10", "step-20", "step-25"]
    assert not lines(caplog)
    assert [line.partition(":")[0] for line in lines(caplog, logging.INFO) if "deleted" in line] == [
        f"step {step} is deleted since step 25 was saved after it" for step in (30, 40)
    ]


@pytest.mark.parametrize("keep_last", [1, 2])
@pytest.mark.parametrize("names", [("step-{}",), (ACTOR, CRITIC)], ids=str)
def test_c410_the_higher_steps_of_keep_every_are_dropped(
    tmp_path: Path, names: tuple[str, ...], keep_last: int, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [5, 10, 15, 20, 25, 30, 35, 7, 8, 12, 20, 25]
    for end, kept in ((7, {10, 20, 30}), (9, set()), (12, {20})):
        directory = tmp_path / str(end)
        run(directory, steps[:end], *names, keep_last=keep_last, keep_every=10, drop_higher=True)
        assert {*steps_in(directory)} == {f"step-{step}" for step in kept | {*steps[end - keep_last : end]}}
        assert stio.latest(directory) == str(directory / f"step-{steps[end - 1]}")
    assert not lines(caplog)


def test_c410_nothing_is_dropped_before_the_lower_step_is_complete(tmp_path: Path) -> None:
    with sync.Saver(durability="none", keep_last=9, drop_higher=True) as saver:
        for step in (1, 2, 3):
            for name in (ACTOR, CRITIC):
                saver.save({"a": torch.ones(1)}, tmp_path / name.format(step)).result()
        saver.save({"a": torch.ones(1)}, tmp_path / ACTOR.format(1)).result()
        assert steps_in(tmp_path) == ["step-1", "step-2", "step-3"]
        saver.save({"a": torch.ones(1)}, tmp_path / CRITIC.format(1)).result()
        assert steps_in(tmp_path) == ["step-1"]


@pytest.mark.parametrize("other", ["best-0.95", "export-7b", "model-v2.safetensors", "epoch-1"])
def test_c410_a_number_of_another_name_drops_nothing(tmp_path: Path, other: str) -> None:
    keywords: dict[str, Any] = {"keep_last": 5, "drop_higher": True}
    with sync.Saver(durability="none", **keywords) as saver:
        for name in ("step-1000", "step-1100", other):
            saver.save({"a": torch.ones(1)}, tmp_path / name).result()
        assert {*steps_in(tmp_path)} == {"step-1000", "step-1100", other}
        saver.save({"a": torch.ones(1)}, tmp_path / "step-1050").result()
        assert {*steps_in(tmp_path)} == {"step-1000", "step-1050", other}


@pytest.mark.parametrize("make", [stio.Saver, sync.Saver, stio.distributed.Saver, sync.distributed.Saver])
def test_c410_c415_wrong_values(make: Any) -> None:
    for keywords in ({"keep_every": 10}, {"drop_higher": True}):
        with pytest.raises(ValueError, match="needs keep_last="):
            make(**keywords)
    for value, error in ((0, ValueError), (True, TypeError), ("10", TypeError)):
        with pytest.raises(error, match="keep_every"):
            make(keep_last=1, keep_every=value)


# 411: a step that lacks a part.


@pytest.mark.parametrize(
    "names",
    [
        (ACTOR, CRITIC),
        ("step-{}", "step-{}/optimizer"),
        ("step-{}/model.safetensors", "step-{}/optimizer.safetensors"),
        ("step-{}", "step-{}/optimizer.safetensors"),
        ("step-{}/a/model", "step-{}/b/model", "step-{}/c"),
    ],
    ids=str,
)
@pytest.mark.parametrize("keywords", [{}, {"max_shard_size": 12}], ids=["plain", "shards"])
def test_c411_latest_leaves_out_a_step_without_a_part(
    tmp_path: Path, names: tuple[str, ...], keywords: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keywords = {} if any(name.endswith(".safetensors") for name in names) else keywords
    run(tmp_path, [1, 2], *names, **keywords)
    assert stio.latest(tmp_path) == str(tmp_path / "step-2")
    run(tmp_path, [3], *names[:-1], **keywords)  # the process is killed before the last save
    assert stio.latest(tmp_path) == str(tmp_path / "step-2")
    (line,) = lines(caplog)
    assert f"step-3: it holds {len(names) - 1} of the {len(names)} checkpoints that step 2 holds (step-2" in line
    run(tmp_path, [3], names[-1], **keywords)
    assert stio.latest(tmp_path) == str(tmp_path / "step-3")


def test_c411_parts_side_by_side(tmp_path: Path) -> None:
    names = ("model-{}.safetensors", "optim-{}.safetensors")
    run(tmp_path, [1], *names)
    run(tmp_path, [2], names[0])
    with pytest.raises(stio.AmbiguousCheckpointError, match="of the newest step, 1"):
        stio.latest(tmp_path)


def test_c411_a_part_that_is_no_longer_saved(tmp_path: Path) -> None:
    """A step needs a part that both steps before it have. A further part is no fault."""
    run(tmp_path, [0, 1], ACTOR, CRITIC)
    for step, newest in ((2, "step-1"), (3, "step-3/actor"), (4, "step-4/actor")):
        run(tmp_path, [step], ACTOR)
        assert stio.latest(tmp_path) == str(tmp_path / newest)
    run(tmp_path, [5], ACTOR, CRITIC)
    assert stio.latest(tmp_path) == str(tmp_path / "step-5")


def test_c411_other_steps_before_do_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the step before has besides checkpoints, what it lost, and a link of its that leads out."""
    run(tmp_path, [1, 2])
    (tmp_path / "step-1" / "notes").mkdir()
    (tmp_path / "step-1" / "notes" / "a.txt").write_text("mine")
    (tmp_path / "step-1" / "model.safetensors").rename(tmp_path / "outside")
    (tmp_path / "step-1" / "model.safetensors").symlink_to(tmp_path / "outside")
    assert stio.latest(tmp_path) == str(tmp_path / "step-2")
    assert not lines(caplog)


@pytest.mark.parametrize("steps", [[2], [2, 3]], ids=str)
def test_c411_a_damaged_step_before_requires_no_part(tmp_path: Path, steps: list[int]) -> None:
    run(tmp_path, [1], ACTOR, CRITIC)
    run(tmp_path, steps, ACTOR)
    damaged = tmp_path / CRITIC.format(1) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4])
    assert stio.latest(tmp_path, default=None) == str(tmp_path / ACTOR.format(steps[-1]))


@pytest.mark.parametrize("added", ["step-{}/merged.safetensors", "step-{}/export"])
def test_c411_what_was_added_to_one_step_is_no_part(tmp_path: Path, added: str) -> None:
    run(tmp_path, [1, 2, 3])
    run(tmp_path, [1], added)
    assert stio.latest(tmp_path) == str(tmp_path / "step-3")
    run(tmp_path, [2], added.replace("}/", "}/other-"))
    run(tmp_path, [4])
    assert stio.latest(tmp_path) == str(tmp_path / "step-4")


# 415: what `keep_last` deletes.


@pytest.mark.parametrize(
    ("folder", "drop_higher"),
    [("run", False), ("from-step-500", False), ("step-500", False), ("step-500", True), ("500", True)],
)
@pytest.mark.parametrize("best", ["best", "best.safetensors", "last/model", "2024-05-01", "20240501-235959"])
def test_c415_names_without_a_step_stay(
    tmp_path: Path, folder: str, best: str, drop_higher: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stio")
    tmp_path /= folder
    with sync.Saver(durability="none", keep_last=2, drop_higher=drop_higher) as saver:
        for step in range(1, 6):
            saver.save({"a": torch.full((3,), float(step))}, tmp_path / f"step-{step}").result()
            if step == 2:
                saver.save({"a": torch.ones(3)}, tmp_path / best).result()
    assert torch.equal(sync.load(tmp_path / best)["a"], torch.ones(3))
    assert [name for name in steps_in(tmp_path) if "step" in name] == ["step-4", "step-5"]
    deleted = [line for line in lines(caplog, logging.INFO) if "deleted" in line]
    assert deleted == [f"step {step} is deleted by keep_last=2: {tmp_path}/step-{step}" for step in (1, 2, 3)]


def test_c415_keep_every(tmp_path: Path) -> None:
    run(tmp_path, [*range(0, 60, 5)], keep_last=2, keep_every=20)
    assert steps_in(tmp_path) == [f"step-{step}" for step in (0, 20, 40, 50, 55)]
    run(tmp_path, [60, 65, 70], keep_last=1, keep_every=25, adopt=tmp_path)
    assert steps_in(tmp_path) == [f"step-{step}" for step in (0, 50, 70)]


def test_c415_deletions_of_trainer_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from stio.integrations._step_dirs import TRAINER_STATE, PublishedSave

    caplog.set_level(logging.INFO, "stio")
    for step in (1, 2):
        with PublishedSave(str(tmp_path), step, durable=False) as save:
            (Path(save.path) / TRAINER_STATE).write_text("{}")
            save.start(keep_last=1)
        save.result()
    assert steps_in(tmp_path) == ["checkpoint-2"]
    assert f"{tmp_path}/checkpoint-1 is deleted by keep_last=1" in lines(caplog, logging.INFO)


# 433: a checkpoint that lies deeper.


@pytest.mark.parametrize("deeper", ["actor/huggingface", "model", "a/b/c", "weights.safetensors"])
def test_c433_the_path_that_loads_is_returned(tmp_path: Path, deeper: str) -> None:
    for step in (9, 10):
        folder = tmp_path / f"global_step_{step}"
        sync.save({"a": torch.full((3,), float(step))}, folder / deeper)
        (folder / "data.pt").write_bytes(b"of another program")
    found = stio.latest(tmp_path)
    assert torch.equal(sync.load(found)["a"], torch.full((3,), 10.0))
    assert found == str(tmp_path / "global_step_10" / deeper).removesuffix("/weights.safetensors")


def test_c433_several_have_the_path_of_the_step(tmp_path: Path) -> None:
    run(tmp_path, [10], "global_step_{}/actor/huggingface", "global_step_{}/critic/huggingface")
    assert stio.latest(tmp_path) == str(tmp_path / "global_step_10")


# 451: a link as a destination.


@pytest.mark.parametrize(
    ("link", "target", "destination"),
    [
        ("latest", "step-10", "latest"),
        ("latest.safetensors", "step-10.safetensors", "latest.safetensors"),
        ("latest", "step-10", "latest/model.safetensors"),
        ("step-5", "step-10", "step-5"),
        ("last", "10", "last/"),
        ("last", "10", "last/model.safetensors"),
    ],
)
@pytest.mark.parametrize("saver", [True, False])
def test_c451_a_link_to_a_step_is_told(
    tmp_path: Path, link: str, target: str, destination: str, saver: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sync.save({"a": torch.ones(3)}, tmp_path / target)
    (tmp_path / link).symlink_to(target)
    if saver:
        run(tmp_path, [7], destination)
    else:
        sync.save({"a": torch.zeros(3)}, f"{tmp_path}/{destination}")
    (line,) = lines(caplog)
    assert "leads by a link to" in line and "so the save replaces step 10" in line


def test_c451_other_links_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that is reached by a link, also one named by a job; a link to a name without a step, and one to nothing."""
    (tmp_path / "data" / "123456").mkdir(parents=True)
    (tmp_path / "job").symlink_to("data/123456")
    (tmp_path / "run-3").mkdir()
    (tmp_path / "run").symlink_to("run-3")
    (tmp_path / "best").symlink_to("elsewhere")
    (tmp_path / "next").symlink_to("step-9")
    in_job = ("job/final", "job/final", "job/a.safetensors")
    for destination in ("run/step-1", "run/best", "best", "best", "next", *in_job):
        sync.save({"a": torch.ones(3)}, tmp_path / destination)
    assert not lines(caplog)


# 452: two savers.


@pytest.mark.parametrize("keep_last", [1, 2])
def test_c452_two_savers_leave_no_empty_directory(tmp_path: Path, keep_last: int) -> None:
    keywords: dict[str, Any] = {"durability": "none", "keep_last": keep_last}
    with sync.Saver(**keywords) as actor, sync.Saver(**keywords) as critic:
        for step in range(1, 5):
            for saver, name in ((actor, ACTOR), (critic, CRITIC))[:: -1 if step % 2 else 1]:
                saver.save({"a": torch.ones(3)}, tmp_path / name.format(step)).result()
    assert steps_in(tmp_path) == [f"step-{step}" for step in range(5 - keep_last, 5)]


# 453: totals in names.


@pytest.mark.parametrize(
    "name",
    [
        "step-{}-of-1000",
        "step_{}_of_1000",
        "{}-of-1000",
        "epoch-1-of-3-step-{}-of-9",
        "checkpoint-{}-of-90",
        "ckpt-{}-of-90",
    ],
)
@pytest.mark.parametrize("kind", ["", "/model", ".safetensors"])
def test_c453_one_idea_of_a_step(tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    if name.startswith("{}") and kind:
        pytest.skip("a shard, or a part of no step")
    run(tmp_path, [8, 9, 10], name + kind, keep_last=2)
    assert len(steps_in(tmp_path)) == 2
    newest = stio.latest(tmp_path)
    assert newest == str(tmp_path / (name + kind).format(10))
    assert torch.equal(sync.load(newest)["a"], torch.full((3,), 10.0))
    assert not lines(caplog)
    run(tmp_path, [9], name + kind)
    assert "higher steps already: 10." in lines(caplog)[0]


@pytest.mark.parametrize(
    "name", ["model-00002-of-00003.safetensors", "checkpoint-0000{}-of-00003.safetensors", "2024-05-{:02}", ".step-{}"]
)
def test_c453_what_is_no_step(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, [2, 1], name, keep_last=1)
    assert {*steps_in(tmp_path)} == {name.format(1), name.format(2)}
    assert not lines(caplog)
    assert stio.latest(tmp_path, default=None) is None


# 458: pickles.


@pytest.mark.parametrize("make", [stio.Saver, sync.Saver, stio.distributed.Saver, sync.distributed.Saver])
@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_c458_a_saver_says_why_it_is_not_pickled(make: Any, duplicate: Any) -> None:
    with pytest.raises(TypeError, match="cannot be pickled or copied: .* belong to this process; make a Saver where"):
        duplicate(make())


@pytest.mark.parametrize("duplicate", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy])
def test_c458_the_callback_of_trainer_is_pickled(tmp_path: Path, duplicate: Any) -> None:
    pytest.importorskip("transformers")
    from stio.integrations.transformers import StioCallback

    callback = StioCallback(tmp_path, keep_last=2, save_optimizer=False, hash="sha256", max_shard_size="1GB")
    copied = duplicate(callback)
    assert copied.__dict__.keys() == callback.__dict__.keys()
    assert (copied._output_dir, copied._keep_last, copied._save_optimizer) == (tmp_path, 2, False)
    assert copied._make_savers.keywords == callback._make_savers.keywords
    assert copied._savers is not callback._savers


# 464: the warning about higher steps.


def test_c464_empty_directories_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-8" / "model" / "deeper").mkdir(parents=True)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / ".lock").touch()
    (tmp_path / "slurm-8812345" / "logs").mkdir(parents=True)
    (tmp_path / "slurm-8812345" / "logs" / "out.log").write_text("of another program")
    run(tmp_path, [1])
    assert not lines(caplog)
    sync.save({"a": torch.ones(1)}, tmp_path / "step-8" / "model")
    run(tmp_path, [1])
    (line,) = lines(caplog)
    assert line.startswith(f"{tmp_path}: this run is at step 1, and there are higher steps already: 8. ")
    shutil.rmtree(tmp_path / "step-8")
    run(tmp_path, [1])
    assert len(lines(caplog)) == 1
