"""Faults 319 and 320: steps of an earlier run, the newest complete checkpoint, a used directory."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import stio
from stio import sync

STATE = {"a": torch.ones(3)}


def value(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), float(number)), "b": torch.full((3,), -float(number))}


def visible(directory: Path) -> list[str]:
    return sorted(os.listdir(directory), key=lambda name: (len(name), name)) if directory.exists() else []


def run(directory: Path, steps: list[int], names: tuple[str, ...] = ("step-{}",), **keywords: Any) -> None:
    """Save steps as one process of a training does."""
    keywords = {"keep_last": 3, **keywords}
    with sync.Saver(**keywords) as saver:
        for step in steps:
            for name in names:
                saver.save(value(step), directory / name.format(step)).result()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# 319: a run takes over the steps of the run before.


def test_c319_a_resumed_run_takes_over_the_steps(tmp_path: Path) -> None:
    run(tmp_path, [1, 2, 3, 4])
    run(tmp_path, [5], adopt=tmp_path)
    assert visible(tmp_path) == ["step-3", "step-4", "step-5"]
    run(tmp_path, [6, 7], adopt=str(tmp_path))
    assert visible(tmp_path) == ["step-5", "step-6", "step-7"]
    run(tmp_path, [8])
    assert visible(tmp_path) == ["step-5", "step-6", "step-7", "step-8"]  # without the keyword nothing is taken over


@pytest.mark.matrix
@pytest.mark.parametrize(
    "names",
    [
        ("step-{}.safetensors",),
        ("model-{}.safetensors", "optim-{}.safetensors"),
        ("model/step-{}", "optim/step-{}"),
        ("step-{}/model.safetensors", "step-{}/optimizer.safetensors"),
        ("step-{}/model", "step-{}/optim"),
        ("{}/model",),
        ("step-{}", "step-{}/optimizer.safetensors"),
        ("epoch-1/step-{}",),
    ],
    ids=str,
)
@pytest.mark.parametrize("keywords", [{}, {"max_shard_size": 12, "hash": "sha256"}], ids=["plain", "sharded"])
def test_c319_however_a_step_is_saved(tmp_path: Path, names: tuple[str, ...], keywords: Any) -> None:
    if keywords and any(name.endswith("safetensors") for name in names):
        keywords = {"hash": "sha256"}
    run(tmp_path, [1, 2, 3], names, **keywords)
    run(tmp_path, [4, 5], names, adopt=tmp_path, **keywords)
    for step in range(1, 6):
        for name in names:
            path = tmp_path / name.format(step)
            assert path.exists() == (step >= 3), path
            if step >= 3 and names != (
                "step-{}",
                "step-{}/optimizer.safetensors",
            ):  # that directory is no one checkpoint
                assert torch.equal(sync.load(path)["a"], value(step)["a"])
    left = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert not any("1" in path.name.partition(".")[0].split("-")[-1:] for path in left)


def test_c319_with_one_step_kept_no_moment_is_without_a_whole_step(tmp_path: Path) -> None:
    names = ("model-{}.safetensors", "optim-{}.safetensors")
    run(tmp_path, [1, 2], names, keep_last=1)
    with sync.Saver(keep_last=1, adopt=tmp_path) as saver:
        saver.save(value(3), tmp_path / "model-3.safetensors").result()
        assert visible(tmp_path) == ["model-2.safetensors", "model-3.safetensors", "optim-2.safetensors"]
        saver.save(value(3), tmp_path / "optim-3.safetensors").result()
        assert visible(tmp_path) == ["model-3.safetensors", "optim-3.safetensors"]


def test_c319_what_is_no_step_of_the_run_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A base model with a number in its name, another run, files of others in a step, what is not complete."""
    run(tmp_path, [1, 2, 3])
    sync.save(STATE, tmp_path / "base-1.safetensors")
    run(tmp_path / "seed-1", [1, 2])
    sync.save(value(1), tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    run(tmp_path, [4, 5, 6, 7], adopt=tmp_path)  # the other run's steps count as parts at first
    assert visible(tmp_path) == [
        *("seed-1", "step-0", "step-1", "step-5", "step-6", "step-7", "base-1.safetensors"),
        "model-00001-of-00002.safetensors",
    ]
    assert visible(tmp_path / "step-1") == ["notes.txt"]
    assert visible(tmp_path / "seed-1") == ["step-1", "step-2"]
    assert any("notes.txt" in line for line in warnings_in(caplog))


def test_c319_ranks_of_one_host_take_over_their_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        run(tmp_path, [1, 2], (f"model-{{}}_rank{rank}.safetensors",), keep_last=2)
    run(tmp_path, [3], ("model-{}_rank0.safetensors",), keep_last=2, adopt=tmp_path)
    assert [name for name in visible(tmp_path) if "rank1" in name] == [f"model-{n}_rank1.safetensors" for n in (1, 2)]


def test_c319_a_step_that_is_saved_again_is_the_newest(tmp_path: Path) -> None:
    run(tmp_path, [1, 2, 3])
    run(tmp_path, [2, 4], adopt=tmp_path)
    assert visible(tmp_path) == ["step-2", "step-3", "step-4"]


def test_c319_a_first_run_has_the_same_call(tmp_path: Path) -> None:
    run(tmp_path / "new", [1, 2, 3, 4], adopt=tmp_path / "new")
    assert visible(tmp_path / "new") == ["step-2", "step-3", "step-4"]


@pytest.mark.parametrize(
    ("adopt", "keep_last", "error", "message"),
    [
        ("run", None, ValueError, "adopt= needs keep_last="),
        (3, 3, TypeError, "adopt= takes the path of a directory, not 3"),
        ("s3://bucket/run", 3, ValueError, "not the URL s3://bucket/run"),
        ("", 3, ValueError, "adopt= takes a directory"),
        (__file__, 3, ValueError, "adopt= takes a directory"),
    ],
)
@pytest.mark.parametrize("make", [stio.Saver, sync.Saver, stio.distributed.Saver, sync.distributed.Saver])
def test_c319_wrong_values(make: Any, adopt: Any, keep_last: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(adopt=adopt, keep_last=keep_last)


# 319: the newest complete checkpoint.


def test_c319_latest(tmp_path: Path) -> None:
    run(tmp_path, [2, 9, 10], keep_last=9)
    assert stio.latest(tmp_path) == str(tmp_path / "step-10")
    assert stio.latest(str(tmp_path) + "/") == str(tmp_path / "step-10")
    assert torch.equal(sync.load(stio.latest(tmp_path))["a"], value(10)["a"])


@pytest.mark.parametrize(
    "name",
    [
        "step-{}.safetensors",
        "step_{:08d}",
        "{}",
        "epoch={}-step=7{}",
        "checkpoint-{}/training_state",
        "model-{}",
        "b{}.0",
    ],
)
def test_c319_latest_under_other_names(tmp_path: Path, name: str) -> None:
    for step in (8, 9, 10):
        sync.save_state({"step": step}, tmp_path / name.format(step, step))
    assert sync.load_state(stio.latest(tmp_path)) == {"step": 10}
    assert stio.latest(tmp_path) == str(tmp_path / name.format(10, 10))


def test_c319_latest_of_lightning(tmp_path: Path) -> None:
    from stio.storage.commit.destination import SingleFile

    for step in (4, 12):
        sync.save_state({"step": step}, SingleFile(str(tmp_path / f"epoch=0-step={step}.ckpt")))
    (tmp_path / "last.ckpt").symlink_to("epoch=0-step=4.ckpt")
    (tmp_path / "log-400.txt").write_text("a line")
    assert sync.load_state(stio.latest(tmp_path)) == {"step": 12}


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)


@pytest.mark.matrix
@pytest.mark.parametrize("keywords", [{}, {"max_shard_size": 12}], ids=["one file", "shards"])
@pytest.mark.parametrize("harm", ["truncated", "missing", "no index", "empty", "garbage", "nothing"])
def test_c319_latest_leaves_out_what_is_not_complete(
    tmp_path: Path, harm: str, keywords: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, [1, 2], **keywords)
    files = sorted((tmp_path / "step-2").glob("*.safetensors"))
    if harm == "truncated":
        truncate(files[-1])
    elif harm == "missing":
        files[-1].unlink()
    elif harm == "no index":
        for path in [*(tmp_path / "step-2").glob("*.json"), *files[1:]]:
            path.unlink()
        files[0].rename(files[0].with_name("model-00001-of-00002.safetensors"))
        truncate(files[0].with_name("model-00001-of-00002.safetensors"))
    elif harm == "empty":
        files[0].write_bytes(b"")
    elif harm == "garbage":
        files[0].write_bytes(b"x" * 100)
    else:
        shutil.rmtree(tmp_path / "step-2")
        (tmp_path / "step-2").mkdir()
    assert stio.latest(tmp_path) == str(tmp_path / "step-1")
    told = [line for line in warnings_in(caplog) if "step-2" in line]
    assert bool(told) == (harm not in ("nothing",) and not (harm == "missing" and not keywords))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model-0123456789-00001-of-00002.safetensors"])
def test_c319_latest_leaves_out_shards_of_which_some_are_missing(
    tmp_path: Path, name: str, beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, [1, 2])
    (tmp_path / "step-2" / "model.safetensors").rename(tmp_path / "step-2" / name)
    if beside and "0123" not in name:
        sync.save(STATE, tmp_path / "step-2" / "optimizer.safetensors")
    assert stio.latest(tmp_path) == str(tmp_path / "step-1")
    assert "shards" in warnings_in(caplog)[0]


@pytest.mark.parametrize("what", ["a link", "a link to a file", "a pickle"])
def test_c319_latest_tells_of_a_newer_step_that_it_cannot_take(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, [1])
    if what == "a pickle":
        (tmp_path / "step-2").mkdir()
        torch.save(STATE, tmp_path / "step-2" / "pytorch_model.bin")
    else:
        (tmp_path / ("step-2" if what == "a link" else "step-2.safetensors")).symlink_to("nowhere")
    (tmp_path / "log-3.txt").symlink_to("nowhere")
    assert stio.latest(tmp_path) == str(tmp_path / "step-1")
    (line,) = warnings_in(caplog)
    assert ("pytorch_model.bin is a file of torch.save" if what == "a pickle" else "is a link to 'nowhere'") in line


@pytest.mark.parametrize(
    "names",
    [
        ("2024-04-30", "2024-05-01"),
        ("20240501-235959", "20240502-000001"),
        ("2024-05-01_12-59-59", "run_2024.5.2"),
        ("20240501_2359.safetensors", "20240502T000001.safetensors"),
    ],
)
def test_c319_latest_takes_no_date_for_a_step(
    tmp_path: Path, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        sync.save(STATE, tmp_path / name)
    with pytest.raises(stio.CheckpointNotFoundError, match="left out: .*its name has a date"):
        stio.latest(tmp_path)
    sync.save(STATE, tmp_path / "2024-05-01-step-3")
    assert stio.latest(tmp_path) == str(tmp_path / "2024-05-01-step-3")
    assert "its name has a date" in warnings_in(caplog)[0]


@pytest.mark.parametrize("name", ["model-20240501", "llama-3-8b-500", "2000", "v2-10-20", "run-20240501-500"])
def test_c319_latest_still_takes_other_numbers(tmp_path: Path, name: str) -> None:
    run(tmp_path, [1], (name,))
    assert stio.latest(tmp_path) == str(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["tmp-checkpoint-3", "step-3.tmp", "step-3_partial", "step-3.incomplete", "step-3.tmp.7"]
)
def test_c319_latest_leaves_out_names_of_work(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, [1, 2])
    os.rename(tmp_path / "step-2", tmp_path / name)
    assert stio.latest(tmp_path) == str(tmp_path / "step-1")
    assert "until it is complete; if it is, rename it" in warnings_in(caplog)[0]
    (tmp_path / name).rename(tmp_path / "step-3")  # the step
    assert stio.latest(tmp_path) == str(tmp_path / "step-3")


def test_c319_latest_follows_links_that_lead_out_if_the_caller_allows_it(tmp_path: Path) -> None:
    run(tmp_path / "run", [1, 2])
    (tmp_path / "run" / "step-2" / "model.safetensors").rename(tmp_path / "x")
    (tmp_path / "run" / "step-2" / "model.safetensors").symlink_to(tmp_path / "x")
    with pytest.raises(stio.UnsafePathError, match="pass follow_symlinks=True"):
        stio.latest(tmp_path / "run")
    found = stio.latest(tmp_path / "run", follow_symlinks=True)
    assert found == str(tmp_path / "run" / "step-2")
    assert sync.load(found, follow_symlinks=True)


def test_c319_latest_leaves_out_hidden_names_and_other_files(tmp_path: Path) -> None:
    run(tmp_path, [1])
    run(tmp_path, [7], (".step-{}",))
    (tmp_path / ".stio-0123456789").mkdir()
    (tmp_path / "logs-99").mkdir()
    (tmp_path / "step-50").write_text("no directory")
    (tmp_path / "plot-60.png").write_bytes(b"png")
    sync.save(STATE, tmp_path / "best")
    assert stio.latest(tmp_path) == str(tmp_path / "step-1")


def test_c319_latest_of_several_checkpoints_in_a_step(tmp_path: Path) -> None:
    run(tmp_path, [1, 2], ("step-{}/model", "step-{}/optim"))
    assert stio.latest(tmp_path) == str(tmp_path / "step-2")
    truncate(tmp_path / "step-2" / "optim" / "model.safetensors")
    assert stio.latest(tmp_path) == str(tmp_path / "step-1")
    run(tmp_path / "flat", [3], ("step-{}.safetensors", "step-{}.optimizer.safetensors"))
    with pytest.raises(stio.AmbiguousCheckpointError, match="step-3.optimizer.safetensors, step-3.safetensors"):
        stio.latest(tmp_path / "flat")


def test_c319_latest_finds_none(tmp_path: Path) -> None:
    with pytest.raises(stio.CheckpointNotFoundError, match="there is no such directory"):
        stio.latest(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of a step"):
        stio.latest(tmp_path)
    sync.save(STATE, tmp_path / "m")
    with pytest.raises(stio.CheckpointNotFoundError, match="it is a checkpoint itself; load it by its path"):
        stio.latest(tmp_path / "m")
    run(tmp_path / "run", [1])
    truncate(tmp_path / "run" / "step-1" / "model.safetensors")
    with pytest.raises(stio.CheckpointNotFoundError, match=r"; left out: .*step-1"):
        stio.latest(tmp_path / "run")
    with pytest.raises(stio.StorageError):
        stio.latest(tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match="a directory of this machine, not the URL s3://bucket"):
        stio.latest("s3://bucket/run")
    with pytest.raises(TypeError):
        stio.latest(3)  # type: ignore[arg-type]


# 320: a fresh run in a used directory.


@pytest.mark.parametrize("names", [("step-{}",), ("step-{}.safetensors",), ("step-{}/model", "step-{}/optim")], ids=str)
@pytest.mark.parametrize("keywords", [{}, {"keep_last": None}], ids=str)
def test_c320_higher_steps_are_told(
    tmp_path: Path, names: tuple[str, ...], keywords: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, [100, 200, 300], names)
    assert not warnings_in(caplog)
    run(tmp_path, [1, 2], names, **keywords)
    for step, line in zip((1, 2), warnings_in(caplog), strict=True):
        assert f"step {step}," in line and "100, 200, 300" in line and str(tmp_path) in line


def test_c320_many_steps_are_not_all_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(10, 30):
        (tmp_path / f"step-{step}.safetensors").touch()
    run(tmp_path, [9])
    (line,) = warnings_in(caplog)
    assert "10, 11, ..., 28, 29" in line


def test_c320_no_warning_without_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, [1, 2])
    run(tmp_path, [3, 4])  # goes on
    (tmp_path / ".step-9").mkdir()
    (tmp_path / "plot-9.png").touch()
    (tmp_path / "model-00009-of-00009.safetensors").touch()
    run(tmp_path, [5])
    run(tmp_path, [1], ("best",))
    assert not warnings_in(caplog)


def test_c320_a_run_that_goes_back_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, [1, 2, 3])
    run(tmp_path, [2], adopt=tmp_path)
    (line,) = warnings_in(caplog)
    assert "higher steps already: 3" in line


@pytest.mark.matrix
@pytest.mark.parametrize("resumes", [False, True])
def test_c320_a_fresh_training_of_trainer(tmp_path: Path, resumes: bool, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    from integrations.trainer_case import make_trainer

    from stio.integrations.transformers import StioCallback

    StioCallback().resume(make_trainer(tmp_path, [], max_steps=4))
    assert not warnings_in(caplog)
    trainer = make_trainer(tmp_path, [StioCallback()], max_steps=6)
    trainer.train(resume_from_checkpoint=True if resumes else None)
    told = [line for line in warnings_in(caplog) if "this run is at step 0" in line and "2, 4" in line]
    assert bool(told) != resumes


def test_c321_a_directory_of_steps_names_the_newest(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()  # of a virtual environment
    with pytest.raises(stio.CheckpointNotFoundError) as caught:
        sync.load(tmp_path)
    assert "may be one" not in str(caught.value)
    for step in (9, 10):
        sync.save(STATE, tmp_path / f"checkpoint-{step}")
    with pytest.raises(stio.CheckpointNotFoundError, match=r"; checkpoint-10 may be one: give its path \(stio\.latest"):
        sync.load(tmp_path)
    assert stio.latest(tmp_path) == str(tmp_path / "checkpoint-10")
