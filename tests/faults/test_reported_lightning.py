"""Faults 313 to 315: checkpoints of Lightning while the training goes on, under names that are not on the disk yet.

Whoever calls Lightning's synchronous interface finds the file afterwards. `ModelCheckpoint` leaves the same files, with
the same contents, as with Lightning's own plugin.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crash.zygote import Zygote
from support import eventually

pytest.importorskip("lightning")

from integrations import lightning_files
from integrations.lightning_case import STEPS_PER_EPOCH, Small, Validated, loader, make_trainer
from integrations.lightning_files import Case, difference, random_case
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

import stio
from stio import sync
from stio.integrations.lightning import RandomStates, StioCheckpointIO
from stio.storage.commit import syscalls as calls

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers:lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",  # of torch, in Lightning's own code
    "ignore:Checkpoint directory .* exists and is not empty",
)


@pytest.fixture
def slow() -> Iterator[None]:
    """Saves are not durable before the step after them has ended."""
    with lightning_files.slow_disk(0.05):
        yield


class At(Callback):
    """Calls a function in one hook."""

    def __init__(self, hook: str, act: Callable[[Trainer], object]) -> None:
        setattr(self, hook, lambda trainer, *_, **__: act(trainer))


def step_of(path: str | Path) -> int:
    """Return the step of a checkpoint that must be complete."""
    step = sync.load_state(path)["global_step"]
    assert isinstance(step, int)
    return step


# 313: names of saves that are not durable yet.

DEFAULT = {"every_n_epochs": 1}
CASES = {
    "two-with-default-names": Case([{"dirpath": "c"}, {"dirpath": "c", "monitor": "val"}]),
    "two-without-directory": Case([DEFAULT, DEFAULT | {"save_top_k": -1, "monitor": "loss"}]),
    "best-of-one-name": Case([{"monitor": "val", "filename": "best", "every_n_train_steps": 1, "save_top_k": 2}]),
    "metric-in-the-name": Case([{"monitor": "loss", "filename": "{loss:.0f}", "every_n_train_steps": 1}]),
    "removed-and-saved-again": Case(
        [{"monitor": "val", "filename": "{val:.0f}", "save_top_k": 1, "mode": "max", "every_n_train_steps": 1}],
        {"val_check_interval": 0.5},
    ),
    "last-of-two": Case([{"save_last": True, "monitor": "val"}, {"save_last": True, "every_n_train_steps": 3}]),
    "link-of-two": Case([{"save_last": "link", "monitor": "val"}, {"save_last": "link", "every_n_train_steps": 3}]),
    "link-and-last": Case(
        [
            {"save_last": "link", "monitor": "loss", "mode": "max", "every_n_train_steps": 3, "filename": "{epoch}"},
            {"save_last": True, "save_top_k": 0, "enable_version_counter": False, "every_n_epochs": 1},
        ]
    ),
    "resumed": Case([{"save_last": True, "monitor": "val", "save_top_k": 2}], resumes=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_c313_the_files_are_those_of_lightning(case: Case, tmp_path: Path) -> None:
    assert difference(case, tmp_path) is None
    assert lightning_files.found(tmp_path / "stio")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 5, 112])
def test_c313_random_arguments(seed: int, tmp_path: Path) -> None:
    assert difference(random_case(seed), tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 220))
def test_c313_more_random_arguments(seed: int, tmp_path: Path) -> None:
    assert difference(random_case(seed), tmp_path) is None


@pytest.mark.slow
def test_c313_load_from_checkpoint_waits_for_a_save_of_its_file(slow: None, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "c", filename="m", every_n_train_steps=1, enable_version_counter=False)
    seen: list[bool] = []

    def look(trainer: Trainer) -> None:
        if trainer.global_step:
            found = Small.load_from_checkpoint(tmp_path / "c" / "m.ckpt").state_dict()
            own = trainer.lightning_module.state_dict()
            seen.append(all(torch.equal(found[name], tensor) for name, tensor in own.items()))

    looking = At("on_train_batch_start", look)
    make_trainer(tmp_path, StioCheckpointIO(), saving, looking, epochs=1).fit(Small(), loader())
    assert seen == [True] * (STEPS_PER_EPOCH - 1)


def test_c313_a_pending_save_counts_as_a_file_and_a_pending_removal_does_not(
    tmp_path: Path, held: threading.Event
) -> None:
    saving, plugin = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1), StioCheckpointIO()
    seen: list[tuple[bool, ...]] = []
    held.set()

    def hold(trainer: Trainer) -> None:
        if trainer.global_step == 2:
            assert eventually(plugin._under_way.pending.done)  # the save of the first step
            held.clear()

    def look(trainer: Trainer) -> None:
        new, old = (tmp_path / "c" / f"epoch=0-step={step}.ckpt" for step in (trainer.global_step, 1))
        if trainer.global_step == 2:
            seen.append((new.exists(), old.exists()))
            seen.append((saving.file_exists(new, trainer), saving.file_exists(old, trainer)))
            held.set()

    setup = saving.setup

    def set_up(trainer: Trainer, *arguments: Any, **keywords: Any) -> None:
        setup(trainer, *arguments, **keywords)
        trainer.callbacks = [*trainer.callbacks, At("on_train_batch_end", look)]  # after `ModelCheckpoint`

    saving.setup = set_up
    trainer = make_trainer(tmp_path, plugin, At("on_train_batch_end", hold), saving, epochs=1)
    trainer.fit(Small(), loader())
    assert seen == [(False, True), (True, False)]
    assert not saving.file_exists(tmp_path / "other.ckpt", trainer)
    (tmp_path / "other.ckpt").touch()
    assert saving.file_exists(tmp_path / "other.ckpt", trainer)


def test_c313_one_file_by_two_paths(tmp_path: Path) -> None:
    """A directory and a link to it: `dirpath` is resolved by Lightning, `default_root_dir` is not."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    callbacks = [ModelCheckpoint(), ModelCheckpoint(tmp_path / "real" / "checkpoints", monitor="loss")]
    with lightning_files.slow_disk(0.1):
        make_trainer(tmp_path / "link", StioCheckpointIO(), *callbacks, epochs=1).fit(Small(), loader())
    assert sorted(os.listdir(tmp_path / "real" / "checkpoints")) == ["epoch=0-step=4-v1.ckpt", "epoch=0-step=4.ckpt"]


def test_c313_a_link_to_the_last_checkpoint_never_points_to_nothing(tmp_path: Path) -> None:
    """A training that is killed then, and resumed from "last", would begin again."""
    saving = ModelCheckpoint(tmp_path / "c", save_last="link", every_n_train_steps=1)
    seen: list[int] = []
    look = At("on_train_batch_start", lambda _: seen.append(step_of(tmp_path / "c" / "last.ckpt") if seen else 0))
    with lightning_files.slow_disk(0.03):
        make_trainer(tmp_path, StioCheckpointIO(), saving, look, epochs=1).fit(Small(), loader())
    assert seen == [0, 1, 2, 3]


def test_c313_a_save_over_a_link_replaces_the_link(tmp_path: Path) -> None:
    plugin = StioCheckpointIO()
    plugin.save_checkpoint({"state_dict": {}, "n": 1}, tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    (tmp_path / "dangling.ckpt").symlink_to("missing.ckpt")
    for name, beside in (("last.ckpt", True), ("dangling.ckpt", False)):
        with plugin.beside_training(tmp_path / (name if beside else "other")):
            plugin.save_checkpoint({"state_dict": {}, "n": 2}, tmp_path / name)
    assert [plugin.load_checkpoint(tmp_path / f"{name}.ckpt")["n"] for name in ("best", "last", "dangling")] == [
        1,
        2,
        2,
    ]
    assert not any(path.is_symlink() or path.name == "missing.ckpt" for path in tmp_path.iterdir())


def test_c313_the_name_of_a_save_that_failed_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plugin, file = calls.fsync, StioCheckpointIO(), tmp_path / "a.ckpt"

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(calls, "fsync", broken)
    with plugin.beside_training(file):
        plugin.save_checkpoint({"state_dict": {}, "n": 1}, file)
    assert plugin.expects(file)
    with pytest.raises(stio.StorageError):
        plugin.collect()
    assert plugin.expects(file) is None
    monkeypatch.setattr(calls, "fsync", plain)
    with plugin.beside_training(file):
        plugin.save_checkpoint({"state_dict": {}, "n": 2}, file)
    plugin.teardown()
    assert plugin.load_checkpoint(file)["n"] == 2


# 314: a save for a requeue.

REQUEUE = """
import logging, os, random, signal, sys, threading, time, warnings
from pathlib import Path
import torch
torch.set_num_threads(1)
warnings.simplefilter("ignore")
from integrations.lightning_case import Small, loader, make_trainer
from integrations.lightning_files import slow_disk
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from stio.integrations.lightning import StioCheckpointIO

where, steps, period = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
os.environ |= {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0",
               "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1",
               "PATH": f"{where}:{os.environ['PATH']}"}

class Signals(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == steps:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_train_start(self, *_):
        told, sent = where / "told", 0
        def send():
            nonlocal sent
            while not done.wait(period * random.random()):
                if sent == (told.read_text().count("requeue") if sent and told.exists() else 0):  # the last is handled
                    os.kill(os.getpid(), signal.SIGUSR1)
                    sent += 1
        if period:
            senders.append(threading.Thread(target=send, daemon=True))
            senders[0].start()

    def on_train_end(self, *_):
        done.set()
        for sender in senders:
            sender.join()
        time.sleep(0.1)  # the last signal is handled

done, senders = threading.Event(), []
saving = ModelCheckpoint(where / "c", every_n_train_steps=1, save_top_k=-1)
with slow_disk(0.02):
    make_trainer(where, StioCheckpointIO(), Signals(), saving, epochs=3).fit(Small(), loader())
print("end")
"""


def scontrol(directory: Path, script: str) -> None:
    """Write a program in the place of SLURM's."""
    (directory / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "scontrol").chmod(0o755)


@pytest.mark.slow
def test_c314_a_requeued_training_finds_its_checkpoint(trainer_zygote: Zygote, tmp_path: Path) -> None:
    """The scheduler kills the process as soon as it was told to requeue it."""
    scontrol(tmp_path, "kill -9 $PPID")
    done = trainer_zygote.run(REQUEUE, tmp_path, 7, 0)
    assert done.returncode == -9, done.stderr
    assert step_of(tmp_path / "hpc_ckpt_1.ckpt") == 7
    scontrol(tmp_path, "exit 0")
    done = trainer_zygote.run(REQUEUE, tmp_path, 9, 0)
    assert done.stdout.endswith("end\n"), done.stderr
    assert step_of(tmp_path / "hpc_ckpt_2.ckpt") == 9


@pytest.mark.slow
def test_c314_signals_at_any_time(trainer_zygote: Zygote, tmp_path: Path) -> None:
    """They also interrupt the code that saves, which then saves inside of itself."""
    scontrol(tmp_path, "echo requeue >> $(dirname $0)/told")
    done = trainer_zygote.run(REQUEUE, tmp_path, -1, 0.05)
    assert done.stdout.endswith("end\n"), done.stderr
    saved = sorted(tmp_path.glob("hpc_ckpt_*.ckpt"))
    assert len(saved) == (tmp_path / "told").read_text().count("requeue") > 0
    assert all(step_of(path) <= 3 * STEPS_PER_EPOCH for path in saved)
    assert len(list((tmp_path / "c").iterdir())) == 3 * STEPS_PER_EPOCH


def test_c314_an_earlier_failure_does_not_prevent_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plugin = calls.fsync, StioCheckpointIO()

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(calls, "fsync", broken)
    with plugin.beside_training(tmp_path / "a.ckpt"):
        plugin.save_checkpoint({"state_dict": {}, "n": 1}, tmp_path / "a.ckpt")
    while not plugin._under_way.pending.done():
        time.sleep(0.01)
    monkeypatch.setattr(calls, "fsync", plain)
    with pytest.raises(stio.StorageError, match="a.ckpt"):
        plugin.save_checkpoint({"state_dict": {}, "n": 2}, tmp_path / "hpc_ckpt_1.ckpt")
    assert plugin.load_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")["n"] == 2


# 315: saves that the training does not wait for, and that something else looks at.


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("weights_only", [False, True])
def test_c315_a_save_after_the_training(tmp_path: Path, weights_only: bool) -> None:
    trainer = make_trainer(tmp_path, StioCheckpointIO(), epochs=1, enable_checkpointing=False)
    trainer.fit(Validated(), loader(), loader())
    trainer.save_checkpoint(tmp_path / "after.ckpt", weights_only=weights_only)
    assert step_of(tmp_path / "after.ckpt") == STEPS_PER_EPOCH
    trainer.validate(Validated(), loader(), verbose=False)
    trainer.save_checkpoint(tmp_path / "validated.ckpt", weights_only=weights_only)
    assert step_of(tmp_path / "validated.ckpt") == STEPS_PER_EPOCH


HOOKS = ["on_train_start", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"]


@pytest.mark.matrix
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("hook", HOOKS)
def test_c315_a_save_by_a_callback(tmp_path: Path, hook: str) -> None:
    seen: list[int] = []

    def act(trainer: Trainer) -> None:
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        seen.append(step_of(tmp_path / "own.ckpt"))

    saving = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1)
    make_trainer(tmp_path, StioCheckpointIO(), At(hook, act), saving, epochs=1).fit(Small(), loader())
    assert seen and seen[-1] == (0 if hook == "on_train_start" else STEPS_PER_EPOCH)


@pytest.mark.matrix
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("place", ["first", "last", "module"])
def test_c315_the_best_checkpoint_is_there_at_the_end(tmp_path: Path, place: str) -> None:
    """Where callbacks copy it, upload it, or test it."""
    seen: list[int] = []
    saving = ModelCheckpoint(tmp_path / "c", monitor="loss", mode="max", save_top_k=2, every_n_train_steps=1)
    look = At("on_train_end", lambda _: seen.append(step_of(saving.best_model_path)))
    callbacks = {"first": [look, saving], "last": [saving, look], "module": [saving]}[place]
    module = Small()
    if place == "module":
        module.on_train_end = lambda: seen.append(step_of(saving.best_model_path))
    make_trainer(tmp_path, StioCheckpointIO(), *callbacks, epochs=2).fit(module, loader())
    assert seen == [step_of(saving.best_model_path)]


@pytest.mark.matrix
@pytest.mark.usefixtures("slow")
@pytest.mark.filterwarnings("ignore:.*called without a model", "ignore:.*no last checkpoint available")
@pytest.mark.parametrize("raised", [ZeroDivisionError, KeyboardInterrupt])
def test_c315_all_checkpoints_are_there_at_an_exception(tmp_path: Path, raised: type[BaseException]) -> None:
    seen: dict[str, int] = {}
    saving = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_on_exception=True)

    def fail(trainer: Trainer) -> None:
        if trainer.global_step == 3:
            raise raised

    def look(trainer: Trainer) -> None:
        seen["of step 2"] = step_of(saving.best_model_path)
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        seen["own"] = step_of(tmp_path / "own.ckpt")

    callbacks = [At("on_train_batch_end", fail), At("on_exception", look), saving, OnExceptionCheckpoint(tmp_path)]
    trainer = make_trainer(tmp_path, StioCheckpointIO(), *callbacks, epochs=1)
    with pytest.raises(SystemExit if raised is KeyboardInterrupt else raised):
        trainer.fit(Small(), loader())
    assert seen == {"of step 2": 2, "own": 3}
    assert step_of(tmp_path / "c" / "epoch=0-step=3.ckpt") == step_of(tmp_path / "on_exception.ckpt") == 3


class Reader(Logger):
    """Reads each checkpoint as soon as it is saved, as loggers do that upload them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    name = "reader"
    version = 0

    def log_metrics(self, *_: object, **__: object) -> None:
        pass

    def log_hyperparams(self, *_: object, **__: object) -> None:
        pass

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.seen.append(step_of(checkpoint_callback.best_model_path))


class Uploads(ModelCheckpoint):
    """Reads each checkpoint as soon as it is saved."""

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        assert step_of(filepath) == trainer.global_step


def with_logger(directory: Path, logger: Any, *callbacks: Callback) -> Trainer:
    trainer = make_trainer(directory, StioCheckpointIO(), *callbacks, epochs=1, log_every_n_steps=1)
    trainer.loggers = [logger]
    return trainer


@pytest.mark.usefixtures("slow")
def test_c315_a_logger_that_reads_checkpoints(tmp_path: Path) -> None:
    reader = Reader()
    saving = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1)
    with_logger(tmp_path, reader, saving).fit(Small(), loader())
    assert reader.seen == [1, 2, 3, 4]


@pytest.mark.usefixtures("slow")
def test_c315_a_subclass_that_reads_checkpoints(tmp_path: Path) -> None:
    saving = Uploads(tmp_path / "c", every_n_train_steps=1, save_last=True)
    make_trainer(tmp_path, StioCheckpointIO(), saving, epochs=1).fit(Small(), loader())
    assert sorted(os.listdir(tmp_path / "c")) == ["epoch=0-step=4.ckpt", "last.ckpt"]


class Quiet(TensorBoardLogger):
    """As that of Lightning, without its package."""

    def __init__(self) -> None:
        pass

    name, version, save_dir, root_dir, log_dir = "quiet", 0, None, "", ""
    experiment = None

    def log_metrics(self, *_: object, **__: object) -> None:
        pass

    log_hyperparams = log_graph = save = finalize = log_metrics


@pytest.mark.parametrize("kind", ["none", "csv", "tensorboard"])
def test_c315_other_trainings_do_not_wait(tmp_path: Path, held: threading.Event, kind: str) -> None:
    """The first save is held until the end of step 3."""
    logger = {"none": None, "csv": CSVLogger(tmp_path / "csv"), "tensorboard": Quiet()}[kind]
    release = At("on_train_batch_end", lambda trainer: trainer.global_step == 3 and held.set())
    saving = ModelCheckpoint(tmp_path / "c", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(tmp_path, StioCheckpointIO(), release, saving, epochs=1, log_every_n_steps=1)
    trainer.loggers = [] if logger is None else [logger]
    trainer.fit(Small(), loader())
    assert sorted(os.listdir(tmp_path / "c")) == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]


@pytest.mark.usefixtures("slow")
def test_c315_without_the_callback_all_saves_are_durable(tmp_path: Path) -> None:
    seen: list[int] = []
    saving = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1)
    look = At("on_train_batch_start", lambda _: saving.best_model_path and seen.append(step_of(saving.best_model_path)))
    trainer = make_trainer(tmp_path, StioCheckpointIO(), look, saving, epochs=1)
    trainer.callbacks[:] = [one for one in trainer.callbacks if not isinstance(one, RandomStates)]
    trainer.fit(Small(), loader())
    assert seen == [1, 2, 3]


@pytest.mark.usefixtures("slow")
def test_c315_fabric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[StioCheckpointIO()])
    fabric.save(tmp_path / "a.ckpt", {"state_dict": {"w": torch.ones(2)}, "step": 3})
    assert sync.load_state(tmp_path / "a.ckpt")["step"] == 3


@pytest.mark.usefixtures("slow")
def test_c315_a_removal_has_happened_when_it_returns(tmp_path: Path) -> None:
    seen: list[bool] = []
    saving = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=-1)

    def act(trainer: Trainer) -> None:
        if trainer.global_step == 3:
            trainer.strategy.remove_checkpoint(saving.best_model_path)
            seen.append(os.path.exists(saving.best_model_path))

    make_trainer(tmp_path, StioCheckpointIO(), At("on_train_batch_end", act), saving, epochs=1).fit(Small(), loader())
    assert seen == [False]
    assert sorted(os.listdir(tmp_path / "c")) == [f"epoch=0-step={step}.ckpt" for step in (1, 3, 4)]


def test_c314_the_first_error_is_raised_whatever_fails_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save may end with an error that is none of stio's: of a tensor whose memory was freed, or of the allocator."""

    def fsync(fd: int) -> None:
        raise MemoryError("none is left")

    def fail(trainer: Trainer) -> None:
        if trainer.global_step == 1:
            raise ZeroDivisionError

    monkeypatch.setattr(calls, "fsync", fsync)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=1)
    trainer = make_trainer(tmp_path, StioCheckpointIO(), At("on_train_batch_start", fail), saving)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Small(), loader())
    assert "none is left" in caplog.text
    assert list(tmp_path.glob("*.ckpt")) == []
