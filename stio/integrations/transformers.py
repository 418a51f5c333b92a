"""Checkpoints of transformers' Trainer that are written while the training goes on, and from which it goes on exactly.

    callback = StioCallback(keep_last=2)
    trainer = Trainer(model, TrainingArguments("out", save_steps=100), train_dataset=data, callbacks=[callback])
    callback.resume(trainer)      # trains; from the newest checkpoint if there is one

The callback uses Trainer's public events alone. A save is asked for at the end of a step, before Trainer logs and
evaluates, and Trainer's own saving comes after that. So the request is taken over and carried out at the next event:
what is drawn from the random generators in between belongs to the steps before. On resume they are set at that event.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from stio.errors import CheckpointNotFoundError, MismatchError, StioError
from stio.integrations._step_dirs import STATE_NAME, TRAINER_STATE, PublishedSave, latest_checkpoint
from stio.integrations._tagged import from_plain, to_plain
from stio.runtime.hashing import HashName
from stio.sync import Saver, load_state

__all__ = ["StioCallback", "latest_checkpoint"]

logger = logging.getLogger("stio")

_WEIGHTS = "model.safetensors"
_STATE_PATTERN = "state{suffix}.safetensors"

_MARK = "stio"
"""Among the states of callbacks in `trainer_state.json`: says that the optimizer is in `STATE_NAME`."""


class StioCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Saves model, optimizer, scheduler and random generators while the training goes on, and goes on from there.

    It saves when `TrainingArguments` says so (`save_strategy="steps"` or `"epoch"`, `save_steps`), and Trainer does
    not, to `checkpoint-<step>` in `output_dir`. Such a directory appears when it is whole and durable. It holds what
    `from_pretrained` takes (the names of the weights are those in memory), `trainer_state.json`, and `training_state/`
    for `stio.load_state`: no pickle, so no `training_args.bin` either.

    Train by `resume(trainer)`. `trainer.train(resume_from_checkpoint=True)` works too, with this callback among the
    trainer's. **Without it** Trainer takes the model alone from such a checkpoint, and says nothing.

    A save that failed is raised by the next one or at the end of the training, which waits for what is under way.
    What Trainer does only while it saves by itself is refused when the training begins: `load_best_model_at_end`,
    `save_strategy="best"`, pushes of each save. So are DeepSpeed, FSDP, PEFT and quantized models.

    Args:
        output_dir: Where checkpoints go; by default to that of `TrainingArguments`.
        keep_last: Delete older checkpoints of this callback, those of earlier processes too, once so many newer ones
            are durable; by default `save_total_limit`, and None keeps all.
        save_optimizer: False saves the model alone, which no training can go on from; so does `save_only_model`.
        max_shard_size: See `stio.save`.
        durability: See `stio.save`.
        hash: See `stio.save`.
        budget_bytes: See `stio.Saver`.

    Raises:
        ValueError: A keyword's value.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        keep_last: int | None = None,
        save_optimizer: bool = True,
        max_shard_size: int | str | None = None,
        durability: Literal["full", "none"] = "full",
        hash: HashName | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        self._output_dir = output_dir
        self._keep_last = keep_last
        self._save_optimizer = save_optimizer
        self._durability: Literal["full", "none"] = durability
        # Two: a model, and its training state while that is written. Checkpoints go one by one.
        self._make_saver = partial(
            Saver,
            max_pending=2,
            max_shard_size=max_shard_size,
            durability=durability,
            hash=hash,
            budget_bytes=budget_bytes,
        )
        self._saver = self._make_saver()
        self._publishing: PublishedSave | None = None
        self._due = False
        self._trainer: Trainer | None = None
        self._resume_from: str | None = None
        self._random: Mapping[str, Any] | None = None
        """What the random generators are to be set to."""
        self._random_at_epoch = False
        """At the beginning of an epoch, or of a step."""

    # For people.

    def resume(self, trainer: Trainer, checkpoint: str | os.PathLike[str] | None = None, **keywords: Any) -> Any:
        """Train, from a checkpoint on. The states of other callbacks are saved and restored by this way only.

        Args:
            trainer: Gets this callback, if it does not have it.
            checkpoint: By default the newest one in the directory that this callback saves to; where there is none,
                the training begins.
            **keywords: For `Trainer.train`.

        Returns:
            What `Trainer.train` returns.

        Raises:
            StioError: A save failed.
        """
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        found = latest_checkpoint(self._directory(trainer.args)) if checkpoint is None else os.fspath(checkpoint)
        self._trainer, self._resume_from = trainer, found
        try:
            result = trainer.train(resume_from_checkpoint=found, **keywords)
        except BaseException:
            try:
                self._end()
            except StioError as error:
                logger.error("saving failed too: %s", error)  # the exception at hand goes first
            raise
        finally:
            self._trainer = self._resume_from = self._random = None
        return result

    def wait(self) -> None:
        """Wait until the save that is under way is durable.

        Raises:
            StioError: It failed, and nobody was told yet.
        """
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.result()

    # Trainer's events, in their order.

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Refuse what does not go, and restore the optimizer if Trainer has restored the model from our checkpoint."""
        reason = _why_not(args, state, now["model"]) or self._why_stateless(args, state)
        if reason:
            raise ValueError(f"StioCallback: {reason}")
        self._due, self._random = False, None
        self._saver = self._make_saver()
        if state.stateful_callbacks.pop(_MARK, None) is not None:
            self._restore(args, state, now)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Save, if that is due, or set the random generators."""
        self._pass(args, state, control, now, at_epoch=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Save, if that is due, or set the random generators."""
        self._pass(args, state, control, now, at_epoch=False)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any
    ) -> TrainerControl:
        """Take over a save that is asked for."""
        return self._take_over(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any
    ) -> TrainerControl:
        """Take over a save that is asked for."""
        return self._take_over(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Leave alone what Trainer was made to save by another callback."""
        self._due = False

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Save, if that is due, and wait until it is durable."""
        if self._due:
            self._save(args, state, control, now, at_epoch=float(state.epoch or 0).is_integer())
        self._end()

    # Saving.

    def _end(self) -> None:
        """Wait for what is under way, and give the staging memory back."""
        try:
            self.wait()
        finally:
            self._saver.close()

    def _take_over(self, control: TrainerControl) -> TrainerControl:
        if control.should_save:
            control.should_save = False
            self._due = True
        return control

    def _pass(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        now: Mapping[str, Any],
        *,
        at_epoch: bool,
    ) -> None:
        if self._due:
            self._save(args, state, control, now, at_epoch=at_epoch)
        if self._random is not None and self._random_at_epoch == at_epoch:
            _set_random(self._random)
            self._random = None

    def _save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        now: Mapping[str, Any],
        *,
        at_epoch: bool,
    ) -> None:
        """Begin to save a checkpoint; return once its snapshot is complete."""
        self._due = False
        self.wait()
        with_state = self._save_optimizer and not args.save_only_model
        training = {"global_step": state.global_step, "at_epoch": at_epoch, "random": _gather_random(args)}
        if self._trainer is not None:
            self._trainer.store_flos()  # gathers too
        if not args.should_save:
            return  # another process does
        save = PublishedSave(self._directory(args), state.global_step, durable=self._durability == "full")
        with save:
            weights = _write_model_files(now["model"], save.path)
            if now.get("processing_class") is not None:
                now["processing_class"].save_pretrained(save.path)
            self._describe(state, control, with_state).save_to_json(os.path.join(save.path, TRAINER_STATE))
            # transformers asks which framework wrote it.
            save.add(self._saver.save(weights, save.path, metadata={"format": "pt"}))
            if with_state:
                training |= _states_of(now)
                where = os.path.join(save.path, STATE_NAME)
                save.add(self._saver.save_state(to_plain(training), where, filename_pattern=_STATE_PATTERN))
        save.start(keep_last=self._keep_last if self._keep_last is not None else args.save_total_limit)
        self._publishing = save

    def _directory(self, args: TrainingArguments) -> str:
        return os.path.abspath(args.output_dir if self._output_dir is None else self._output_dir)

    def _describe(self, state: TrainerState, control: TrainerControl, with_state: bool) -> TrainerState:
        """Return what `trainer_state.json` is to say."""
        callbacks = {**state.stateful_callbacks, type(control).__name__: control.state()}
        if self._trainer is not None:
            exported = [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
            callbacks = dataclasses.replace(state, stateful_callbacks=[*exported, control]).stateful_callbacks
        if with_state:
            callbacks[_MARK] = {"args": {}, "attributes": {}}
        return dataclasses.replace(state, stateful_callbacks=callbacks)

    def _why_stateless(self, args: TrainingArguments, state: TrainerState) -> str | None:
        others = set(state.stateful_callbacks) - {TrainerControl.__name__, _MARK}
        if self._trainer is None and others and args.restore_callback_states_from_checkpoint:
            return (
                f"the states of {', '.join(sorted(others))} are out of its reach; train by StioCallback.resume(trainer)"
            )
        return None

    # Going on.

    def _restore(self, args: TrainingArguments, state: TrainerState, now: Mapping[str, Any]) -> None:
        """Restore what Trainer has not: all but the model, its own state and the place in the data."""
        home = self._resume_from or os.path.join(self._directory(args), f"checkpoint-{state.global_step}")
        path = os.path.join(home, STATE_NAME)
        try:
            training = from_plain(load_state(path))
        except CheckpointNotFoundError as error:
            error.add_note("resume from another directory by StioCallback.resume(trainer, checkpoint)")
            raise
        if training["global_step"] != state.global_step:
            raise MismatchError(
                "this is the training state of another checkpoint than the one that Trainer resumes from",
                path=path,
                expected=f"step {state.global_step}",
                found=f"step {training['global_step']}",
            )
        now["optimizer"].load_state_dict(training["optimizer"])
        now["lr_scheduler"].load_state_dict(training["scheduler"])
        if training["scaler"] is not None and (scaler := _scaler_of(now)) is not None:
            scaler.load_state_dict(training["scaler"])
        if len(training["random"]) == args.world_size:
            self._random, self._random_at_epoch = training["random"][args.process_index], training["at_epoch"]
        else:
            logger.warning("the random generators are of %d processes and begin afresh", len(training["random"]))


def _why_not(args: TrainingArguments, state: TrainerState, model: nn.Module) -> str | None:
    """Return what asks for Trainer's own saving, None if nothing does."""
    if args.load_best_model_at_end or args.save_strategy == "best":
        return "the best model is known to Trainer's own saving only; leave out load_best_model_at_end and 'best'"
    if args.push_to_hub and args.hub_strategy != "end":
        return 'only Trainer\'s own saving pushes; say hub_strategy="end", and push when the training is done'
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        return "DeepSpeed and FSDP need Trainer's own saving"
    if state.is_hyper_param_search:
        return "a hyperparameter search needs Trainer's own saving"
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        return "adapters (PEFT) need Trainer's own saving"
    if getattr(model, "hf_quantizer", None) is not None:
        return "quantized models need Trainer's own saving"
    return None


def _write_model_files(model: nn.Module, directory: str) -> dict[str, torch.Tensor]:
    """Write all that `from_pretrained` takes but the weights; return those."""
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(directory, state_dict={})  # config, generation config, code of its own
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, _WEIGHTS))  # some versions write one without any
    return model.state_dict()


def _states_of(now: Mapping[str, Any]) -> dict[str, Any]:
    scaler = _scaler_of(now)
    return {
        "optimizer": now["optimizer"].state_dict(),
        "scheduler": now["lr_scheduler"].state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def _scaler_of(now: Mapping[str, Any]) -> Any:
    """Return the scaler of gradients that accelerate has given to its optimizer, None if there is none."""
    return getattr(now["optimizer"], "scaler", None)


def _gather_random(args: TrainingArguments) -> list[dict[str, Any]]:
    """Return the states of the random generators of all processes, in order; all of them must come here."""
    mine = _get_random()
    if args.world_size == 1:
        return [mine]
    states: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(states, mine)
    return states


def _get_random() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        # Not of devices that nothing has used: to ask would begin to use them.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def _set_random(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(one, device)
