"""Pushes of transformers' Trainer to the hub: whole, durable checkpoints, while the training goes on."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from integrations.trainer_case import WEIGHTS, AtStep, make_trainer
from support import require_equal
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback

from stio import sync
from stio.integrations.transformers import StioCallback
from stio.storage.commit import syscalls as calls


class FakeHub:
    """Copies what is uploaded, on one thread, as HfApi does.

    Args:
        directory: For the copies.
    """

    def __init__(self, directory: Path) -> None:
        self.commits: list[tuple[str, str, Path]] = []
        """Message, path in the repository, copied files of each upload."""
        self.go_on = threading.Event()
        """Uploads wait for it."""
        self.go_on.set()
        self.error: Exception | None = None
        self.unsynced: set[str] = set()
        """Uploaded files that were never made durable."""
        self.synced: set[tuple[int, int]] = set()
        self._directory = directory
        self._thread = ThreadPoolExecutor(1)

    def create_repo(self, repo_id: str, **keywords: Any) -> Any:
        assert keywords["exist_ok"]
        return SimpleNamespace(repo_id=f"somebody/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: str, run_as_future: bool = False, **keywords: Any) -> Any:
        assert repo_id == "somebody/out"
        job: Future[None] = self._thread.submit(self._upload, folder_path, **keywords)
        return job if run_as_future else job.result()

    def _upload(
        self,
        folder_path: str,
        *,
        commit_message: str,
        ignore_patterns: tuple[str, ...] | list[str] = (),
        path_in_repo: str = ".",
        **keywords: Any,
    ) -> None:
        assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        place = self._directory / str(len(self.commits))
        for source in (path for path in Path(folder_path).rglob("*") if path.is_file()):
            name = str(source.relative_to(folder_path))
            if not any(fnmatch(name, pattern) for pattern in ignore_patterns):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, place / name)
                one = source.stat()
                if (one.st_dev, one.st_ino) not in self.synced:
                    self.unsynced.add(name)
        self.commits.append((commit_message, path_in_repo, place))

    def close(self) -> None:
        self.go_on.set()
        self._thread.shutdown()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    fake, plain = FakeHub(tmp_path / "hub"), calls.fsync

    def fsync(fd: int) -> None:
        plain(fd)
        one = os.fstat(fd)
        fake.synced.add((one.st_dev, one.st_ino))

    monkeypatch.setattr(calls, "fsync", fsync)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, *names, **keywords: fake.create_repo(*names, **keywords))
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **keywords: fake.upload_folder(**keywords))
    yield fake
    fake.close()


def pushing(tmp_path: Path, callbacks: list[TrainerCallback], strategy: str, **arguments: Any) -> Trainer:
    arguments = {"hub_always_push": True} | arguments
    return make_trainer(tmp_path / "out", callbacks, push_to_hub=True, hub_strategy=strategy, **arguments)


def test_every_save(tmp_path: Path, hub: FakeHub) -> None:
    pushing(tmp_path, [StioCallback()], "every_save", save_steps=4).train()
    assert [commit[:2] for commit in hub.commits] == [
        (f"Training in progress, step {step}", ".") for step in (4, 8, 10)
    ]
    for step, (_, _, place) in zip((4, 8, 10), hub.commits, strict=True):
        assert sorted(os.listdir(place)) == ["config.json", "generation_config.json", WEIGHTS]
        require_equal(sync.load(place), sync.load(tmp_path / "out" / f"checkpoint-{step}"))
        GPT2LMHeadModel.from_pretrained(place)
    assert hub.unsynced == set()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("strategy", "places"),
    [("checkpoint", ["last-checkpoint"] * 2), ("all_checkpoints", ["checkpoint-5", "checkpoint-10"])],
)
def test_checkpoints_too(tmp_path: Path, hub: FakeHub, strategy: str, places: list[str]) -> None:
    pushing(tmp_path, [StioCallback()], strategy, save_strategy="epoch").train()
    assert [place for _, place, _ in hub.commits] == [".", places[0], ".", places[1]]
    assert [message for message, _, _ in hub.commits][:2] == [
        "Training in progress, epoch 1",
        "Training in progress, epoch 1, checkpoint",
    ]
    assert hub.unsynced == set()
    # What was uploaded is a checkpoint: a training resumes from it, to the same end.
    again = make_trainer(tmp_path / "again", [], save_strategy="no")
    (tmp_path / "downloaded").mkdir()
    checkpoint = shutil.move(hub.commits[1][2], tmp_path / "downloaded" / "checkpoint-5")
    StioCallback().resume(again, checkpoint)
    require_equal(again.model.state_dict(), sync.load(tmp_path / "out" / "checkpoint-10"))


@pytest.mark.slow
def test_at_the_end_only(tmp_path: Path, hub: FakeHub) -> None:
    trainer = pushing(tmp_path, [StioCallback()], "end")
    trainer.train()
    assert hub.commits == []
    trainer.push_to_hub()
    [(message, _, place)] = hub.commits
    assert message == "End of training"
    names = sorted(os.listdir(place))
    assert {"README.md", "config.json", WEIGHTS} <= set(names)
    assert not [name for name in names if name.startswith((".", "checkpoint"))]


@pytest.mark.slow
def test_the_training_goes_on_while_a_checkpoint_is_pushed(tmp_path: Path, hub: FakeHub) -> None:
    """Later checkpoints are not pushed meanwhile, and the one that is pushed is not deleted."""
    hub.go_on.clear()
    seen: list[bool] = []

    def act(step: int) -> None:
        callback.wait()
        seen.append((tmp_path / "out" / "checkpoint-2").is_dir())
        if step == 9:
            hub.go_on.set()
            pushed.result(30)

    callback = StioCallback(keep_last=1)
    trainer = pushing(tmp_path, [callback, AtStep(act)], "every_save", hub_always_push=False)
    plain, jobs = hub.upload_folder, []
    hub.upload_folder = lambda **keywords: jobs.append(plain(**keywords)) or jobs[-1]  # type: ignore[method-assign]
    pushed: Any = SimpleNamespace(result=lambda seconds: jobs[0].result(seconds))
    trainer.train()
    assert seen == [False, False] + [True] * 8  # the save of step 2 begins after the end of that step
    assert [message for message, _, _ in hub.commits] == [
        "Training in progress, step 2",
        "Training in progress, step 10",
    ]
    assert [name for name in os.listdir(tmp_path / "out") if name.startswith("checkpoint")] == ["checkpoint-10"]


@pytest.mark.slow
def test_the_last_checkpoint_is_pushed_before_trainer_deletes_it(tmp_path: Path, hub: FakeHub) -> None:
    """At the end of a training with `save_total_limit=1` Trainer deletes all but the best one."""
    plain = hub.upload_folder

    def upload_folder(*, folder_path: str, **keywords: Any) -> Any:
        if folder_path.endswith("checkpoint-10"):
            hub.go_on.clear()
            threading.Timer(0.2, hub.go_on.set).start()
        return plain(folder_path=folder_path, **keywords)

    hub.upload_folder = upload_folder  # type: ignore[method-assign]
    trainer = pushing(
        tmp_path,
        [StioCallback()],
        "every_save",
        save_steps=5,
        eval_strategy="steps",
        eval_steps=5,
        metric_for_best_model="score",
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    trainer.compute_metrics = lambda _: {"score": -float(trainer.state.global_step)}
    trainer.train()
    assert [message for message, _, _ in hub.commits] == [f"Training in progress, step {step}" for step in (5, 10)]
    assert WEIGHTS in os.listdir(hub.commits[1][2])
    assert [name for name in os.listdir(tmp_path / "out") if name.startswith("checkpoint")] == ["checkpoint-5"]


@pytest.mark.slow
def test_a_failed_push_is_logged(tmp_path: Path, hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    hub.error = OSError("no network")
    trainer = pushing(tmp_path, [StioCallback(keep_last=2)], "every_save")
    with caplog.at_level(logging.WARNING, "stio"):
        trainer.train()
    assert "a checkpoint could not be pushed to the hub: no network" in caplog.messages
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-10", "checkpoint-8"]


@pytest.mark.slow
def test_a_failed_start_of_a_push_is_logged(
    tmp_path: Path, hub: FakeHub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_repo(self: HfApi, name: str, **keywords: Any) -> None:
        raise ValueError("not allowed")

    trainer = pushing(tmp_path, [StioCallback()], "every_save")
    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    with caplog.at_level(logging.WARNING, "stio"):
        trainer.train()
    assert caplog.messages.count("a checkpoint could not be pushed to the hub: not allowed") == 5
    assert hub.commits == []


def test_what_could_not_be_saved_is_not_pushed(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(calls, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        pushing(tmp_path, [StioCallback()], "every_save").train()
    assert hub.commits == []


def test_a_finished_training_pushes_nothing(tmp_path: Path, hub: FakeHub) -> None:
    StioCallback().resume(pushing(tmp_path, [], "every_save", save_steps=10))
    assert len(hub.commits) == 1
    StioCallback().resume(pushing(tmp_path, [], "every_save", save_steps=10))
    assert len(hub.commits) == 1
