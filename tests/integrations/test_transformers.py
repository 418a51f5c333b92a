"""transformers' real Trainer on the CPU: exact resumes, whole directories, saves beside the training, errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import python_path
from integrations.trainer_case import NUM_STEPS, STEPS_PER_EPOCH, WEIGHTS, AtStep, make_model, make_trainer, result
from safetensors.torch import load_file
from support import require_equal
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, Trainer, TrainerCallback

import stio
from stio import sync
from stio.integrations.transformers import StioCallback, latest_checkpoint
from stio.storage.commit import syscalls as calls

Weights = dict[str, torch.Tensor]


class Stop(Exception):
    """What stops a training in its middle."""


def stop_at(last: int) -> AtStep:
    def act(step: int) -> None:
        if step == last:
            raise Stop

    return AtStep(act)


def weights_of(trainer: Trainer) -> Weights:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Weights after a training in which nothing is saved, and no callback of stio's takes part."""
    trainer = make_trainer(tmp_path_factory.mktemp("undisturbed"), [], save_strategy="no")
    trainer.train()
    return weights_of(trainer)


@pytest.mark.slow
def test_saving_does_not_change_the_training(tmp_path: Path, undisturbed: Weights) -> None:
    trainer = make_trainer(tmp_path, [StioCallback()])
    trainer.train()
    require_equal(weights_of(trainer), undisturbed)
    assert names_in(tmp_path) == [f"checkpoint-{step}" for step in (10, 2, 4, 6, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[] if step % 4 == 1 else pytest.mark.slow) for step in range(1, NUM_STEPS + 1)]
)
def test_a_resumed_training_ends_with_the_same_weights(tmp_path: Path, undisturbed: Weights, step: int) -> None:
    callback = StioCallback(keep_last=1)
    with pytest.raises(Stop):
        # The callback that stops comes last, so a save that is due at this step is not begun.
        callback.resume(make_trainer(tmp_path, [callback, stop_at(step)], save_steps=1))
    assert latest_checkpoint(tmp_path) == (str(tmp_path / f"checkpoint-{step - 1}") if step > 1 else None)
    callback = StioCallback(keep_last=1)
    again = make_trainer(tmp_path, [callback], save_steps=1)
    assert callback.resume(again).global_step == NUM_STEPS
    require_equal(weights_of(again), undisturbed)
    assert names_in(tmp_path) == [f"checkpoint-{NUM_STEPS}"]


@pytest.mark.matrix
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_none_keeps_all(tmp_path: Path, limit: int) -> None:
    """As Trainer's own rotation reads it."""
    make_trainer(tmp_path, [StioCallback()], save_steps=5, save_total_limit=limit).train()
    assert names_in(tmp_path) == ["checkpoint-10", "checkpoint-5"]


def test_methods_that_the_caller_has_replaced_are_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [], save_steps=5)
    plain, num_calls = trainer.get_batch_samples, []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        num_calls.append(1)
        return plain(*arguments, **keywords)

    trainer.get_batch_samples = counted
    StioCallback().resume(trainer)
    assert len(num_calls) == NUM_STEPS
    StioCallback().resume(trainer)  # complete: it takes no further step
    assert len(num_calls) == NUM_STEPS
    assert trainer.get_batch_samples is counted


@pytest.mark.slow
def test_forgotten_generators_are_noticed(
    tmp_path: Path, undisturbed: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail: without the generators dropout differs, and so do the weights."""
    with pytest.raises(Stop):
        StioCallback().resume(make_trainer(tmp_path, [stop_at(7)]))
    monkeypatch.setattr("stio.integrations.transformers.set_random_states", lambda _: None)
    again = make_trainer(tmp_path, [])
    StioCallback().resume(again)
    with pytest.raises(AssertionError):
        require_equal(weights_of(again), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"eval_strategy": "steps", "eval_steps": 1},
        {"eval_strategy": "epoch", "save_strategy": "epoch"},
        {"gradient_accumulation_steps": 2, "save_steps": 1},
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "steps",
            "eval_steps": 2,
            "metric_for_best_model": "loss",
        },
        {"max_steps": 8},
    ],
    ids=["evaluation", "epochs", "accumulation", "plateau", "max_steps"],
)
def test_all_of_the_last_checkpoint_is_the_same(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Optimizer, scheduler and generators too; by Trainer's own `resume_from_checkpoint`."""
    plain = make_trainer(tmp_path / "plain", [StioCallback()], **arguments)
    plain.train()
    with pytest.raises(Stop):
        make_trainer(
            tmp_path / "stopped", [callback := StioCallback(), stop_at(plain.state.max_steps - 1)], **arguments
        ).train()
    callback.wait()
    resumed = make_trainer(tmp_path / "stopped", [StioCallback()], **arguments)
    resumed.train(resume_from_checkpoint=True)
    last = f"checkpoint-{plain.state.max_steps}"
    for name in (WEIGHTS, "training_state/state.safetensors"):
        assert (tmp_path / "plain" / last / name).read_bytes() == (tmp_path / "stopped" / last / name).read_bytes()


@pytest.mark.slow  # the kills of two processes, which take no less, are in `make test`
def test_two_processes(tmp_path: Path) -> None:
    """Each has its own dropout; one saves for both."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "integrations.ranks", str(tmp_path)]
    shared = {"PYTHONPATH": python_path(), "WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ended
    assert [stdout.splitlines()[-1] for stdout, _ in ended] == ["rank 0: 6 steps", "rank 1: 6 steps"]
    training = sync.load_state(tmp_path / "whole" / "checkpoint-6" / "training_state")
    assert not torch.equal(*(one["torch"] for one in training["random"]))


def test_a_checkpoint_is_what_from_pretrained_takes(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [StioCallback()], save_steps=NUM_STEPS)
    trainer.train()
    path = tmp_path / f"checkpoint-{NUM_STEPS}"
    assert names_in(path) == ["config.json", "generation_config.json", WEIGHTS, "trainer_state.json", "training_state"]
    loaded = GPT2LMHeadModel.from_pretrained(path)
    require_equal(dict(loaded.state_dict()), weights_of(trainer))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    require_equal(sync.load(path), weights_of(trainer))
    state = json.loads((path / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"]) == (NUM_STEPS, NUM_STEPS)
    training = sync.load_state(path / "training_state")
    assert set(training) == {"at_epoch", "global_step", "optimizer", "random", "scaler", "scheduler"}


@pytest.mark.slow
def test_in_shards(tmp_path: Path, undisturbed: Weights) -> None:
    callback = StioCallback(max_shard_size=4096, hash="sha256")
    with pytest.raises(Stop):
        callback.resume(make_trainer(tmp_path, [callback, stop_at(6)]))
    path = tmp_path / "checkpoint-4"
    assert "model.safetensors.index.json" in names_in(path)
    assert len(list(path.glob("model-0000?-of-0000?.safetensors"))) > 2
    assert set(GPT2LMHeadModel.from_pretrained(path).state_dict()) == set(undisturbed)
    callback.resume(again := make_trainer(tmp_path, []))
    require_equal(weights_of(again), undisturbed)


def test_a_module_that_is_no_pretrained_model(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return self.inner(input_ids=input_ids, labels=labels)

    trainer = make_trainer(tmp_path, [StioCallback()], model=Plain(), save_steps=NUM_STEPS)
    trainer.train()
    path = tmp_path / f"checkpoint-{NUM_STEPS}"
    assert names_in(path) == [WEIGHTS, "trainer_state.json", "training_state"]
    require_equal(sync.load(path), weights_of(trainer))


@pytest.mark.slow
def test_the_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, held: threading.Event) -> None:
    """The save of step 2 is held until step 4 has begun; nothing of it is to be seen till then."""
    seen: list[list[str]] = []

    def act(step: int) -> None:
        seen.append([name for name in os.listdir(tmp_path) if not name.startswith(".")])
        if step == 4:
            held.set()

    make_trainer(tmp_path, [StioCallback(), AtStep(act)], save_steps=2).train()
    assert seen[:4] == [[], [], [], []]
    assert set(seen[-1]) >= {"checkpoint-2", "checkpoint-4", "checkpoint-6"}  # each save waits for the one before
    assert len(names_in(tmp_path)) == 5


def test_a_snapshot_is_of_its_step(tmp_path: Path, held: threading.Event) -> None:
    weights: dict[int, Weights] = {}

    def act(step: int) -> None:
        weights[step] = weights_of(trainer)
        if step == 4:
            held.set()

    trainer = make_trainer(tmp_path, [AtStep(act), StioCallback()])
    trainer.train()
    for step in (2, 4):
        require_equal(sync.load(tmp_path / f"checkpoint-{step}"), weights[step])


@pytest.mark.matrix
@pytest.mark.parametrize("by_resume", [True, False])
def test_an_error_of_a_save_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_resume: bool) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(calls, "fsync", fsync)
    callback = StioCallback()
    trainer = make_trainer(tmp_path, [callback], save_steps=NUM_STEPS)
    with pytest.raises(stio.StorageError, match="Input/output error"):
        callback.resume(trainer) if by_resume else trainer.train()
    assert names_in(tmp_path) == []


def test_the_first_error_is_raised_whatever_fails_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fsync(fd: int) -> None:
        raise MemoryError("none is left")

    monkeypatch.setattr(calls, "fsync", fsync)
    callback = StioCallback()
    with pytest.raises(Stop):
        callback.resume(make_trainer(tmp_path, [callback, stop_at(3)], save_steps=2))
    assert "none is left" in caplog.text
    assert names_in(tmp_path) == []


def test_an_error_of_a_save_is_raised_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    last: list[int] = []
    monkeypatch.setattr(calls, "fsync", fsync)
    with pytest.raises(stio.StorageError):
        make_trainer(tmp_path, [StioCallback(), AtStep(last.append)]).train()
    assert last[-1] == 4


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "history": object()}

    model = make_model()
    trainer = make_trainer(tmp_path, [StioCallback()], model=model)
    trainer.optimizer = Odd(model.parameters(), lr=1e-2)
    with pytest.raises(TypeError, match=r"state\['optimizer'\]\['history'\] is an object"):
        trainer.train()
    assert names_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "arguments"), [(2, {}), (None, {"save_total_limit": 2}), (2, {"save_total_limit": 1})]
)
def test_old_checkpoints_go_those_of_former_processes_too(
    tmp_path: Path, keep: int | None, arguments: dict[str, Any]
) -> None:
    (tmp_path / "checkpoint-notes").mkdir()
    with pytest.raises(Stop):
        callback = StioCallback(keep_last=keep)
        callback.resume(make_trainer(tmp_path, [callback, stop_at(7)], **arguments))
    assert names_in(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-notes"]
    StioCallback(keep_last=keep).resume(make_trainer(tmp_path, [], **arguments))
    assert names_in(tmp_path) == ["checkpoint-10", "checkpoint-8", "checkpoint-notes"]


@pytest.mark.slow
def test_checkpoints_of_trainers_own_stay_and_can_be_resumed_from(tmp_path: Path, undisturbed: Weights) -> None:
    with pytest.raises(Stop):
        make_trainer(tmp_path, [stop_at(6)]).train()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    trainer = make_trainer(tmp_path, [])
    StioCallback(keep_last=1).resume(trainer)
    require_equal(weights_of(trainer), undisturbed)
    assert names_in(tmp_path) == ["checkpoint-10", "checkpoint-2", "checkpoint-4"]


@pytest.mark.slow
def test_without_the_optimizer(tmp_path: Path) -> None:
    for number, trainer in enumerate(
        [
            make_trainer(tmp_path / "0", [StioCallback(save_optimizer=False, keep_last=1)]),
            make_trainer(tmp_path / "1", [StioCallback(keep_last=1)], save_only_model=True),
        ]
    ):
        trainer.train()
        assert names_in(tmp_path / str(number)) == ["checkpoint-10"]
        assert "training_state" not in names_in(tmp_path / str(number) / "checkpoint-10")
        assert latest_checkpoint(tmp_path / str(number)) is None


def test_a_directory_of_its_own(tmp_path: Path, undisturbed: Weights) -> None:
    with pytest.raises(Stop):
        callback = StioCallback(tmp_path / "deep" / "mine")
        callback.resume(make_trainer(tmp_path / "out", [callback, stop_at(7)]))
    trainer = make_trainer(tmp_path / "out", [])
    StioCallback(tmp_path / "deep" / "mine").resume(trainer)
    require_equal(weights_of(trainer), undisturbed)
    assert not (tmp_path / "out").exists() or names_in(tmp_path / "out") == []


@pytest.mark.slow
def test_a_training_state_that_is_not_found_is_an_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "there", [StioCallback()], save_steps=5)
    trainer.train()
    elsewhere = make_trainer(tmp_path / "here", [StioCallback()])
    with pytest.raises(stio.CheckpointNotFoundError) as caught:
        elsewhere.train(resume_from_checkpoint=str(tmp_path / "there" / "checkpoint-5"))
    assert "resume(trainer, checkpoint)" in caught.value.__notes__[0]
    (tmp_path / "there" / "checkpoint-10" / "training_state").rename(tmp_path / "state")
    (tmp_path / "there" / "checkpoint-5" / "training_state").rename(
        tmp_path / "there" / "checkpoint-10" / "training_state"
    )
    with pytest.raises(stio.MismatchError, match="another checkpoint"):
        make_trainer(tmp_path / "there", [StioCallback()]).train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize("logs", ["steps", "no"])
def test_weights_and_optimizer_are_of_one_run(tmp_path: Path, logs: str) -> None:
    """Trainer does not say where it resumes: the step alone would fit a checkpoint of another run."""
    for name, rate in (("mine", 1e-2), ("theirs", 1e-3)):
        callback = StioCallback()
        make_trainer(
            tmp_path / name, [callback], learning_rate=rate, max_steps=4, logging_strategy=logs, logging_steps=1
        ).train()
    theirs = tmp_path / "theirs" / "checkpoint-2"
    for path in (theirs, shutil.copytree(theirs, tmp_path / "copied" / "checkpoint-2")):
        trainer = make_trainer(tmp_path / "mine", [StioCallback()], max_steps=4)
        with pytest.raises(stio.MismatchError, match=r"another run; resume with StioCallback.resume\(trainer, chec"):
            trainer.train(resume_from_checkpoint=str(path))
    callback = StioCallback()
    callback.resume(make_trainer(tmp_path / "mine", [callback], max_steps=4), theirs)  # the step
    # A directory that was copied or renamed as a whole is resumed from.
    shutil.copytree(tmp_path / "theirs", tmp_path / "moved")
    make_trainer(tmp_path / "moved", [StioCallback()], max_steps=4).train(
        resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-2")
    )


@pytest.mark.slow
def test_resume_from_a_chosen_checkpoint(tmp_path: Path, undisturbed: Weights) -> None:
    make_trainer(tmp_path / "there", [StioCallback()]).train()
    trainer = make_trainer(tmp_path / "here", [])
    StioCallback().resume(trainer, tmp_path / "there" / "checkpoint-6")
    require_equal(weights_of(trainer), undisturbed)
    assert names_in(tmp_path / "here") == ["checkpoint-10", "checkpoint-8"]


@pytest.mark.slow
def test_training_again_replaces_checkpoints_of_the_same_step(tmp_path: Path, undisturbed: Weights) -> None:
    make_trainer(tmp_path, [StioCallback()], learning_rate=0.5).train()
    (tmp_path / "checkpoint-2" / "note").touch()
    make_trainer(tmp_path, [StioCallback()]).train()
    (kept,) = tmp_path.glob(".stio-kept-*/note")
    require_equal(sync.load(tmp_path / "checkpoint-10"), undisturbed)
    assert len([name for name in names_in(tmp_path) if name != kept.parent.name]) == 5


@pytest.mark.slow
def test_states_of_other_callbacks(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "restore_callback_states_from_checkpoint": True,
    }
    with pytest.raises(ValueError, match="cannot reach the states of EarlyStoppingCallback"):
        make_trainer(tmp_path, [EarlyStoppingCallback(9), StioCallback()], **arguments).train()
    callback, early = StioCallback(), EarlyStoppingCallback(9, 100.0)  # never better by so much
    with pytest.raises(Stop):
        callback.resume(make_trainer(tmp_path, [early, callback, stop_at(7)], **arguments))
    assert early.early_stopping_patience_counter == 2
    counters = []
    again = make_trainer(tmp_path, [EarlyStoppingCallback(9, 100.0)], **arguments)
    StioCallback().resume(again)
    for one in again.callback_handler.callbacks:
        if isinstance(one, EarlyStoppingCallback):
            counters.append(one.early_stopping_patience_counter)
    assert counters == [4]


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_c315_a_callback_that_reads_what_was_saved_finds_it(tmp_path: Path, strategy: str) -> None:
    """Those of Weights & Biases and MLflow upload the checkpoint in this event."""
    seen: list[tuple[int, bool, Any]] = []

    class Reading(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **now: Any) -> None:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            seen.append((state.global_step, (path / WEIGHTS).exists(), now["model"]))

    callback = StioCallback(keep_last=1)
    trainer = make_trainer(tmp_path, [Reading(), callback], save_steps=4, save_strategy=strategy)
    callback.resume(trainer)
    steps = {"steps": [4, 8, NUM_STEPS], "epoch": [STEPS_PER_EPOCH, NUM_STEPS]}[strategy]
    assert seen == [(step, True, trainer.model) for step in steps]


@pytest.mark.slow
def test_what_another_callback_makes_trainer_save_is_left_to_it(tmp_path: Path) -> None:
    class Insistent(AtStep):
        def on_step_end(self, args: Any, state: Any, control: Any, **now: Any) -> Any:
            control.should_save = state.global_step == 4
            return control

    make_trainer(tmp_path, [StioCallback(), Insistent(print)], save_steps=2).train()
    assert "optimizer.pt" in names_in(tmp_path / "checkpoint-4")
    assert "training_state" in names_in(tmp_path / "checkpoint-2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trainer: setattr(trainer.args, "fsdp", ["full_shard"]), "FSDP"),
        (lambda trainer: setattr(trainer.args, "deepspeed", {"zero": 3}), "DeepSpeed"),
        (lambda trainer: setattr(trainer.state, "is_hyper_param_search", True), "hyperparameter"),
    ],
)
def test_what_needs_trainers_own_saving_is_refused(
    tmp_path: Path, change: Callable[[Trainer], None], message: str
) -> None:
    trainer = make_trainer(tmp_path, [StioCallback()])
    change(trainer)
    callback = trainer.pop_callback(StioCallback)
    with pytest.raises(ValueError, match=message):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


@pytest.mark.parametrize(
    ("attribute", "message"), [("_hf_peft_config_loaded", "adapters"), ("hf_quantizer", "quantized")]
)
def test_models_that_are_saved_in_another_way_are_refused(tmp_path: Path, attribute: str, message: str) -> None:
    trainer = make_trainer(tmp_path, [StioCallback()])
    setattr(trainer.model, attribute, True)
    callback = trainer.pop_callback(StioCallback)
    with pytest.raises(ValueError, match=message):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [({"keep_last": 0}, "keep_last"), ({"max_shard_size": "many"}, "many"), ({"durability": "some"}, "durability")],
)
def test_wrong_keywords(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StioCallback(**keywords)


def test_latest_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for name, files in {
        "checkpoint-9": ["trainer_state.json", "optimizer.pt"],
        "checkpoint-10": ["trainer_state.json", "training_state"],
        "checkpoint-11": ["trainer_state.json"],  # the model alone
        "checkpoint-12": ["optimizer.pt"],  # Trainer was killed in it
        "checkpoint-x": ["trainer_state.json", "optimizer.pt"],
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    (tmp_path / "checkpoint-13").touch()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_the_files_load_elsewhere(tmp_path: Path) -> None:
    """By the official reader, without stio."""
    make_trainer(tmp_path, [StioCallback()], save_steps=NUM_STEPS).train()
    assert set(result(tmp_path)) >= {WEIGHTS}
    path = tmp_path / f"checkpoint-{NUM_STEPS}"
    assert len(load_file(path / WEIGHTS)) < len(load_file(path / "training_state" / "state.safetensors"))
    assert STEPS_PER_EPOCH * 2 == NUM_STEPS
