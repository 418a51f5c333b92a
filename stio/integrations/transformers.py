"""Checkpoints for Trainer of transformers: written while the training goes on, and resumed to the exact state.

    callback = StioCallback(keep_last=2)
    trainer = Trainer(model, TrainingArguments("out", save_steps=100), train_dataset=data, callbacks=[callback])
    callback.resume(trainer)      # trains, from the newest checkpoint if there is one

The callback uses the public events of Trainer only. Trainer decides to save at the end of a step, then logs and
evaluates, and would save after that. So the callback takes over the request, and saves at the next event: random
numbers that are drawn in between belong to the steps before. A resume sets the random generators at the same event.
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
"""Key among the states of callbacks in `trainer_state.json`: the optimizer is in `STATE_NAME`."""


class StioCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Saves model, optimizer, scheduler and random generators while the training goes on, and resumes from them.

    It saves in place of Trainer, when `TrainingArguments` requests it (`save_strategy="steps"` or `"epoch"`,
    `save_steps`), to `checkpoint-<step>` in `output_dir`. The directory appears when it is complete and durable. It
    holds the files for `from_pretrained` (with the names of the weights in memory), `trainer_state.json`, and
    `training_state/` for `stio.load_state`. There is no pickle, so no `training_args.bin` either.

    Train with `resume(trainer)`. `trainer.train(resume_from_checkpoint=True)` works too if the trainer has this
    callback. **Without the callback** Trainer loads only the model from such a checkpoint, without a warning.

    If a save fails, the next save raises the error, at the latest the end of the training, which waits for saves under
    way. Features that only a save by Trainer itself supports raise an error at the start of the training:
    `load_best_model_at_end`, `save_strategy="best"`, pushes of each save, DeepSpeed, FSDP, PEFT, quantized models.

    Args:
        output_dir: Directory of the checkpoints; by default that of `TrainingArguments`.
        keep_last: Number of durable checkpoints to keep. Older ones of this callback are deleted, those of earlier
            processes too. What another program has replaced or added in them stays, and a warning names it. The default
            is `save_total_limit`; if that is None too, all are kept.
        save_optimizer: False saves only the model; a training cannot resume from that. `save_only_model` does the same.
        max_shard_size: See `stio.save`.
        durability: See `stio.save`.
        hash: See `stio.save`.
        budget_bytes: See `stio.Saver`.

    Raises:
        ValueError: The value of a keyword is out of range.
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
        # Two saves: the model and its training state. There is one checkpoint at a time.
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
        """States for the random generators."""
        self._random_at_epoch = False
        """Whether to set them at the start of an epoch, or of a step."""

    # Public methods.

    def resume(self, trainer: Trainer, checkpoint: str | os.PathLike[str] | None = None, **keywords: Any) -> Any:
        """Train, from a checkpoint on. Only this method saves and restores the states of other callbacks.

        Args:
            trainer: The callback is added to it if it is missing.
            checkpoint: By default the newest one in the directory of this callback. If there is none, the training
                starts from the beginning.
            **keywords: Keywords of `Trainer.train`.

        Returns:
            The result of `Trainer.train`.

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
                logger.error("saving failed too: %s", error)  # the first exception is the one to raise
            raise
        finally:
            self._trainer = self._resume_from = self._random = None
        return result

    def wait(self) -> None:
        """Wait until the save under way is durable.

        Raises:
            StioError: It failed, and the error was not raised yet.
        """
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.result()

    # Events of Trainer, in their order.

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Check for unsupported features; restore the optimizer if Trainer restored the model from our checkpoint."""
        reason = _why_not(args, state, now["model"]) or self._why_stateless(args, state)
        if reason:
            raise ValueError(f"StioCallback: {reason}")
        self._due, self._random = False, None
        self._saver = self._make_saver()
        if state.stateful_callbacks.pop(_MARK, None) is not None:
            self._restore(args, state, now)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Save if a save is due, or set the random generators."""
        self._pass(args, state, control, now, at_epoch=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Save if a save is due, or set the random generators."""
        self._pass(args, state, control, now, at_epoch=False)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any
    ) -> TrainerControl:
        """Take over a requested save."""
        if control.should_save:
            control.should_save = False
            self._due = True
        return control

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Save nothing: another callback made Trainer save itself."""
        self._due = False

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Save if a save is due, and wait until it is durable."""
        if self._due:
            self._save(args, state, control, now, at_epoch=float(state.epoch or 0).is_integer())
        self._end()

    # Saving.

    def _end(self) -> None:
        """Wait for the save under way, and release the staging memory."""
        try:
            self.wait()
        finally:
            self._saver.close()

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
        """Start to save a checkpoint; return when its snapshot is complete."""
        self._due = False
        self.wait()
        with_state = self._save_optimizer and not args.save_only_model
        training = {"global_step": state.global_step, "at_epoch": at_epoch, "random": _gather_random(args)}
        if self._trainer is not None:
            self._trainer.store_flos()  # gathers from all processes too
        if not args.should_save:
            return  # another process saves
        save = PublishedSave(self._directory(args), state.global_step, durable=self._durability == "full")
        with save:
            weights = _write_model_files(now["model"], save.path)
            if now.get("processing_class") is not None:
                now["processing_class"].save_pretrained(save.path)
            self._describe(state, control, with_state).save_to_json(os.path.join(save.path, TRAINER_STATE))
            # transformers reads the framework from the metadata.
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
        """Return the content of `trainer_state.json`."""
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
            return f"it cannot reach the states of {', '.join(sorted(others))}; train with StioCallback.resume(trainer)"
        return None

    # Resuming.

    def _restore(self, args: TrainingArguments, state: TrainerState, now: Mapping[str, Any]) -> None:
        """Restore all that Trainer does not: it restores the model, its own state and the position in the data."""
        checkpoint = self._resume_from or os.path.join(self._directory(args), f"checkpoint-{state.global_step}")
        path = os.path.join(checkpoint, STATE_NAME)
        try:
            training = from_plain(load_state(path))
        except CheckpointNotFoundError as error:
            error.add_note("resume from another directory with StioCallback.resume(trainer, checkpoint)")
            raise
        if training["global_step"] != state.global_step:
            raise MismatchError(
                "the training state belongs to another checkpoint than the one that Trainer resumes from",
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
            logger.warning(
                "the saved random generators are those of %d processes; they are not restored", len(training["random"])
            )


def _why_not(args: TrainingArguments, state: TrainerState, model: nn.Module) -> str | None:
    """Return the reason why only Trainer itself can save, None if there is none."""
    if args.load_best_model_at_end or args.save_strategy == "best":
        return "only a save by Trainer itself records the best model; leave out load_best_model_at_end and 'best'"
    if args.push_to_hub and args.hub_strategy != "end":
        return 'only Trainer\'s own saving pushes; use hub_strategy="end", which pushes after the training'
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
    """Write all files for `from_pretrained` except the weights; return the weights."""
    model = getattr(model, "_orig_mod", model)  # the model inside a compiled one
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(directory, state_dict={})  # config, generation config, its code
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, _WEIGHTS))  # some versions write one without tensors
    return model.state_dict()


def _states_of(now: Mapping[str, Any]) -> dict[str, Any]:
    scaler = _scaler_of(now)
    return {
        "optimizer": now["optimizer"].state_dict(),
        "scheduler": now["lr_scheduler"].state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def _scaler_of(now: Mapping[str, Any]) -> Any:
    """Return the gradient scaler that accelerate attached to the optimizer, None if there is none."""
    return getattr(now["optimizer"], "scaler", None)


def _gather_random(args: TrainingArguments) -> list[dict[str, Any]]:
    """Return the states of the random generators of all processes, in order. All processes must call it."""
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
        # No states of unused devices: the query would initialize them.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def _set_random(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(one, device)
