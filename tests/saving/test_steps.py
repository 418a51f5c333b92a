"""Steps: which saves belong together, and when a step is old."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import stio.sync
from stio.format.files.names import step_of
from stio.saving import retention
from stio.storage.commit.retention import WrittenFiles

STATE = {"a": torch.ones(3)}


@pytest.mark.parametrize(
    ("step", "paths"),
    [
        (3, ["/r/step-3", "/r/step-3/model", "/r/step-3.safetensors", "/r/step-3.optimizer.safetensors"]),
        (
            3,
            [
                "/r/step-3/model_rank0.safetensors",
                "/r/step-3/t5",
                "/r/step-3/unet2/w.safetensors",
                "/r/step_0003_ema/o",
            ],
        ),
        (3, ["/r/model/step-3", "/r/optim/step-3", "/r/model_step3.safetensors", "/r/optim-3.safetensors", "/q/b_3"]),
        (3, ["/r/step-3-loss-0.25.safetensors", "/r/step-3-loss-0.25/model_0", "/r/epoch=3-val_loss=0.25/model_0"]),
        (100, ["/r/epoch=0-step=100.ckpt", "/r/epoch=0-step=100/w", "/exp-7/epoch-1/step-100/model", "/r/ep1-ba100"]),
        (100, ["/r/step-100.0.safetensors", "/r/step-100.1.safetensors", "/r/w100.0", "/r/step-100.0/w", "/r/100.1/w"]),
        (100, ["/r2/global_step100/mp_rank_00.safetensors", "/r/iter_0000100/rank-1", "/r/step-100/0/model"]),
        (100, ["/r/100", "/r/100/model_rank0.safetensors", "/r/100.safetensors", "/r/100/step_x"]),
        (100, ["/r/model-100_rank0.safetensors", "/r/model-100.part-1.safetensors", "/r/step-100-ema/rank1"]),
        (100, ["/2024/run/model-100", "/2024/run/b100", "/iter3-sweep/w100", "/exp2/b100.optimizer.safetensors"]),
        (12, ["/r/Checkpoint 12/model", "/r/checkpoint-12", "/r/ckpt12/x", "/r/EPOCH_12"]),
        (2024, ["/2024/model-100"]),
        (
            None,
            ["/exp2/best", "/r/last.safetensors", "/checkpoints_2024/best", "/a/2024-11-22/best", "/", "", "/rank0"],
        ),
    ],
)
def test_the_step_of_a_path(step: int | None, paths: list[str]) -> None:
    assert {path: found and found[0] for path in paths for found in [step_of(path)]} == dict.fromkeys(paths, step)


@pytest.mark.parametrize(
    ("path", "holder"),
    [
        ("/r/step-3/a/w", "/r/step-3"),
        ("/r/step-3.w", "/r/step-3.w"),
        ("/r/100/w", "/r/100"),
        ("/r3/b100", "/r3/b100"),
        ("/r/step-3-ema/w", "/r/step-3-ema"),
    ],
)
def test_where_the_number_of_a_step_stands(path: str, holder: str) -> None:
    """Directories at and below this path belong to the step."""
    found = step_of(path)
    assert found is not None
    assert found[1] == holder


def saved(directory: Path, *names: str, keep_last: int = 1) -> list[str]:
    with stio.sync.Saver(keep_last=keep_last, durability="none") as saver:
        for name in names:
            saver.save(STATE, directory / name)
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def parts(*steps: str) -> list[str]:
    """Return destinations: `1ab` is step 1 with the parts a and b."""
    return [f"step-{step[0]}/{part}.safetensors" for step in steps for part in step[1:]]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("saves", "left"),
    [
        (["1ab", "2a"], ["1ab", "2a"]),
        (["1ab", "2ab"], ["2ab"]),
        (["1ab", "2aa"], ["1ab", "2a"]),
        (["1ab", "2a", "3a"], ["1ab", "2a", "3a"]),
        (["1ab", "2a", "3ab"], ["3ab"]),
        (["1ab", "2a", "3a", "4a"], ["4a"]),
        (["1ab", "2a", "3ab", "4a", "5a"], ["3ab", "4a", "5a"]),
        (["1a", "2ab", "3a"], ["2ab", "3a"]),
        (["1ab", "2a", "3a", "2b", "3b"], ["3ab"]),
        (["1ab", "2ab", "1a"], ["1a", "2ab"]),
        (["1ab", "2ab", "1ab"], ["1ab"]),
    ],
    ids=lambda steps: " ".join(steps),
)
def test_a_step_goes_when_a_newer_one_is_complete(tmp_path: Path, saves: list[str], left: list[str]) -> None:
    """Until the newest step has as many saves as those before it, a training could not resume from it."""
    assert saved(tmp_path, *parts(*saves)) == parts(*left)


@pytest.mark.parametrize("num_failed", [1, 2])
def test_a_part_that_failed_belongs_to_its_step(tmp_path: Path, num_failed: int) -> None:
    """The last complete step stays, however many steps after it lack a part."""
    failing = parts(*[f"{step}b" for step in range(2, 2 + num_failed)])
    with stio.sync.Saver(keep_last=1, durability="none") as saver:
        for name in parts("1ab", *[f"{step}ab" for step in range(2, 2 + num_failed)]):
            if name in failing:
                with pytest.raises(stio.StioError):
                    saver.save(STATE, "/proc/stio-test" / Path(name)).result()
            else:
                saver.save(STATE, tmp_path / name).result()
        last = 2 + num_failed
        saver.save(STATE, tmp_path / parts(f"{last}a")[0]).result()
        assert all((tmp_path / name).exists() for name in parts("1ab"))
        saver.save(STATE, tmp_path / parts(f"{last}b")[0]).result()
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{last}"]


@pytest.mark.parametrize("again", [False, True], ids=["once", "tried again"])
def test_a_part_that_was_refused_belongs_to_its_step(tmp_path: Path, again: bool) -> None:
    """Before it began, for example because its tensors are none."""
    with stio.sync.Saver(keep_last=1, durability="none") as saver:
        for name in parts("1ab", "2a"):
            saver.save(STATE, tmp_path / name).result()
        with pytest.raises(TypeError):
            saver.save({"a": "no tensor"}, tmp_path / parts("2b")[0])  # type: ignore[dict-item]
        if again:
            saver.save(STATE, tmp_path / parts("2b")[0]).result()
        saver.save(STATE, tmp_path / parts("3a")[0]).result()
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-3", *([] if again else ["step-1"])}


def test_saves_that_are_under_way_at_once(tmp_path: Path) -> None:
    names = parts("1ab", "2ab", "3ab")
    with stio.sync.Saver(keep_last=2, max_pending=6, durability="none") as saver:
        for name in names:
            saver.save(STATE, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_a_deletion_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, failures = WrittenFiles.remove, [2]

    def remove(*args: Any, **keywords: Any) -> None:
        if failures[0]:
            failures[0] -= 1
            raise stio.StorageError("deleting failed", path="step", errno=errno.ESTALE)
        plain(*args, **keywords)

    monkeypatch.setattr(WrittenFiles, "remove", remove)
    with stio.sync.Saver(keep_last=1, durability="none") as saver:
        for step in range(1, 5):
            saver.save(STATE, tmp_path / f"step-{step}").result()
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    assert len(caplog.records) == 1


def test_a_step_that_is_saved_again_while_its_deletion_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = WrittenFiles.remove
    with stio.sync.Saver(keep_last=1, durability="none") as saver:
        saver.save(STATE, tmp_path / "step-1").result()
        with monkeypatch.context() as patched:
            patched.setattr(WrittenFiles, "remove", refuse)
            saver.save(STATE, tmp_path / "step-2").result()
        assert WrittenFiles.remove is plain
        saver.save({"b": torch.ones(3)}, tmp_path / "step-1").result()
    assert stio.sync.load(tmp_path / "step-1").keys() == {"b"}


def refuse(*args: Any, **keywords: Any) -> None:
    raise stio.StorageError("deleting failed", path="step", errno=errno.ESTALE)


def test_records_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = retention.Retention(1)
    for step in range(5000):
        kept.attempt(f"/x/step-{step}", "model{suffix}.safetensors")
    assert len(kept._attempts) < 1000
    for step in range(5000):
        kept.attempt(f"/x/step-{step}", "model{suffix}.safetensors")
        if step % 100 == 99:
            kept._take_attempts()
    assert len(kept._steps) < 1000
    for name in range(5000):
        kept.attempt(f"/x/step-0/{name}", "model{suffix}.safetensors")
        if name % 100 == 99:
            kept._take_attempts()
    assert sum(len(step.attempted) for step in kept._steps.values()) < 1000
    monkeypatch.setattr(WrittenFiles, "remove", refuse)
    for step in range(100):
        kept.add(f"/y/step-{step}", None, WrittenFiles())
    assert len(kept._undeleted) < 50
    assert len(kept._steps) == 1


def test_without_keep_last_nothing_is_recorded() -> None:
    kept = retention.Retention(None)
    kept.attempt("/x/step-1", "")
    kept.add("/x/step-1", None, WrittenFiles())
    assert not kept._attempts
    assert not kept._steps


def test_directories_that_the_saver_made_for_a_step_go_with_it(tmp_path: Path) -> None:
    (tmp_path / "step-2").mkdir()
    names = [f"step-{step}/{part}" for step in (1, 2, 3) for part in ("a/b.safetensors", "c")]
    assert saved(tmp_path, *names) == ["step-3/a/b.safetensors", "step-3/c/model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    assert list((tmp_path / "step-2").iterdir()) == []


def test_one_path_that_is_saved_to_again_and_again(tmp_path: Path) -> None:
    assert saved(tmp_path / "file", *["last.safetensors"] * 4) == ["last.safetensors"]
    assert saved(tmp_path / "directory", *["last"] * 4) == ["last/model.safetensors"]


def test_a_step_that_is_saved_again_is_the_newest(tmp_path: Path) -> None:
    left = saved(
        tmp_path, "step-1.safetensors", "step-2.safetensors", "step-1.safetensors", "step-3.safetensors", keep_last=2
    )
    assert left == ["step-1.safetensors", "step-3.safetensors"]


def test_a_step_that_is_saved_again_in_part_is_not_complete(tmp_path: Path) -> None:
    """Its other part is that of the first time."""
    assert saved(tmp_path / "x", *parts("1ab", "2ab", "1a", "3ab"), keep_last=2) == parts("1ab", "2ab", "3ab")
    assert saved(tmp_path / "y", *parts("1ab", "2ab", "1ab", "3ab"), keep_last=2) == parts("1ab", "3ab")


def test_what_stays_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with stio.sync.Saver(keep_last=1, hash="sha256", max_shard_size=20, durability="none") as saver:
        for step in range(5):
            saver.save({**STATE, "b": torch.ones(3)}, tmp_path / f"step-{step}").result()
            if step == 0:
                (tmp_path / "step-0" / "notes.txt").touch()
            if step == 1:
                (tmp_path / "step-1" / "model.safetensors.index.json").write_text("{}")
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert f"{tmp_path}/step-0 stays" in warnings[0]
    assert "notes.txt" in warnings[0]
    assert f"{tmp_path}/step-1/model.safetensors.index.json stays" in warnings[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-1", "step-4"]


def test_no_warning_names_what_the_saver_itself_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, "run", "run/x", "run", "run/model.safetensors", "run/x", "y")
    assert not caplog.text
