"""Checkpoints for Trainer of transformers: written while the training goes on, and resumed to the exact state.

    callback = StioCallback(keep_last=2)
    trainer = Trainer(model, TrainingArguments("out", save_steps=100), train_dataset=data, callbacks=[callback])
    callback.resume(trainer)      # trains, from the newest checkpoint if there is one

The callback uses the public events of Trainer only. Trainer decides to save at the end of a step, then logs and
evaluates, and would save after that. So the callback takes over the request, and saves at the next event: random
numbers that are drawn in between belong to the steps before. A resume sets the random generators at the same event.

At the end Trainer logs its summary, and loads the best model after that. So the callback completes the last save at
that log event: before it the model has the weights of the last step, after it all checkpoints are durable on all
processes.

Processes that train together get the same events in the same order. At each save, and at the end, they exchange their
errors: an error of one process is raised on all of them. If the model is sharded (FSDP2), all of them write what
they hold into one staging directory, and the first one publishes it. Otherwise one process saves.

transformers 5 gives weights of many models other names in files than in the module. Checkpoints have those of the
files, except under FSDP2, where no process has whole tensors, and for models whose files hold several tensors of the
module as one. Trainer itself would load only weights whose names are the same in both, without an error.

Three methods of a trainer are replaced while it resumes: `get_batch_samples` of a training that is complete, and
`_load_from_checkpoint` and `_load_best_model`, which are not public.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stio import PendingSave, sync
from stio.device import FileNames
from stio.errors import CheckpointNotFoundError, MismatchError, install_command, listed
from stio.integrations._step_dirs import (
    STATE_NAME,
    TRAINER_STATE,
    HubPushes,
    JoinedSave,
    PublishedSave,
    latest_checkpoint,
    resumable_checkpoints,
)
from stio.integrations._training import (
    exchange,
    from_plain,
    on_all,
    random_states,
    set_optimizer_state,
    set_random_states,
    states_of_rank,
    to_plain,
)
from stio.loading.targets import views_in_files
from stio.saving import tied_names, warn_of_higher_steps
from stio.sync import load_state

try:
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:
    raise ImportError(f"StioCallback is a callback of transformers: {install_command('transformers')}") from error

__all__ = ["StioCallback", "latest_checkpoint"]

logger = logging.getLogger("stio")

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_STATE_PATTERN = "state{suffix}.safetensors"

_SUMMARY = "train_runtime"
"""Key that only the summary has that Trainer logs after the last step."""

_BATCHES = "get_batch_samples"
"""Method of Trainer that returns the batches of the next step."""

_LOAD_CHECKPOINT, _LOAD_BEST = "_load_from_checkpoint", "_load_best_model"
"""Methods of Trainer that load weights: under FSDP from files of accelerate only, else by the names of the module."""

_REPLACED = (_BATCHES, _LOAD_CHECKPOINT, _LOAD_BEST)

_STATE_KEY = "stio"
"""Key among the states of callbacks in `trainer_state.json`: the optimizer is in `STATE_NAME`."""


@dataclass(frozen=True, slots=True)
class _TrainerEvent:
    """What Trainer passes to its callbacks."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    now: Mapping[str, Any]
    """The model, the optimizer and so on, by Trainer's keywords."""


class StioCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Saves model, optimizer, scheduler and random generators while the training goes on, and resumes from them.

    It saves in place of Trainer, when `TrainingArguments` requests it (`save_strategy="steps"`, `"epoch"` or `"best"`,
    `save_steps`), to `checkpoint-<step>` in `output_dir`. The directory appears when it is complete and durable. It
    holds the files for `from_pretrained` (with the names that `save_pretrained` gives to weights),
    `trainer_state.json`, and `training_state/` for `stio.load_state`. There is no pickle, so no `training_args.bin`
    either. Of a PEFT model only the adapters are saved, by PEFT itself, while the training waits.

    Train with `resume(trainer)`. `trainer.train(resume_from_checkpoint=True)` works too if the trainer has this
    callback, and the model's weights have the same names in files as in the module. **Without the callback** Trainer
    loads only the model from such a checkpoint, without a warning.

    `load_best_model_at_end` loads the best checkpoint, and no limit deletes it before. With `push_to_hub`, a checkpoint
    is pushed when it is durable, as `hub_strategy` says; a failed push logs a warning.

    Under FSDP2 (`fsdp=True`) each process writes what it holds, and reads its part; nothing is gathered, and the files
    have the same layout. A checkpoint resumes on another number of processes, also on one without FSDP. All processes
    need the same directory. Train with `resume(trainer)`, which replaces the methods by which Trainer loads weights.

    If a save fails, the next save raises the error, at the latest the end of the training, which waits for saves under
    way. Of several processes each raises it, and `train` returns on each when the last checkpoint is durable.
    Features that only a save by Trainer itself supports raise an error at the start of the training: DeepSpeed, FSDP1,
    adapters under FSDP2, hyperparameter search, adapters without PEFT's own model, quantized models.

    Trainer calls `on_save` of its callbacks when a checkpoint is complete, and a callback may read it then (those of
    Weights & Biases and MLflow upload it). If another callback has `on_save`, a training by `resume` waits at each save
    until the checkpoint is durable, and calls it. `trainer.train` does not call it: it gives this callback no others.

    Args:
        output_dir: Directory of the checkpoints; by default that of `TrainingArguments`.
        keep_last: Number of durable checkpoints to keep. Older ones of this callback are deleted, those of earlier
            processes too, except the best one. What another program has replaced or added in them stays, and a warning
            names it. The default is `save_total_limit`; if that is None too, all are kept.
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
        hash: Literal["sha256", "xxh3"] | None = None,
        budget_bytes: int | str | None = None,
    ) -> None:
        if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int)):
            raise TypeError(f"keep_last takes a number, not {keep_last!r}")
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        self._output_dir = output_dir
        self._keep_last = keep_last
        self._save_optimizer = save_optimizer
        self._durability: Literal["full", "none"] = durability
        self._make_savers = partial(
            _Savers, max_shard_size=max_shard_size, durability=durability, hash=hash, budget_bytes=budget_bytes
        )
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._savers = self._make_savers()
        self._publishing: JoinedSave | None = None
        self._pushes: HubPushes | None = None
        self._due = False
        self._is_observed = False
        """Whether other callbacks are called after each save."""
        self._training = False
        """Whether a training has begun, and its last save has not ended."""
        self._complete = False
        """Whether the training was complete when it was started again."""
        self._trainer: Trainer | None = None
        self._resume_from: str | None = None
        self._random: Mapping[str, Any] | None = None
        """States for the random generators."""
        self._random_at_epoch = False
        """Whether to set them at the start of an epoch, or of a step."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the keywords alone: a copy belongs to no training that is under way."""
        keywords = ("_output_dir", "_keep_last", "_save_optimizer", "_durability", "_make_savers")
        return {name: getattr(self, name) for name in keywords}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_afresh()

    # Public methods.

    def resume(self, trainer: Trainer, checkpoint: str | os.PathLike[str] | None = None, **keywords: Any) -> Any:
        """Train, from a checkpoint on. Only this method saves and restores the states of other callbacks.

        A training that is complete takes no further step and saves nothing: it has reached `max_steps` or its last
        epoch. One that another callback has stopped goes on. (`trainer.train` itself takes one more
        step if `max_steps` ended it within an epoch.)

        Args:
            trainer: The callback is added to it if it is missing.
            checkpoint: By default the newest one in the directory of this callback, of several processes the newest
                that all of them see. If there is none, the training starts from the beginning.
            **keywords: Keywords of `Trainer.train`.

        Returns:
            The result of `Trainer.train`.

        Raises:
            MismatchError: The processes see no checkpoint in common, but some see one.
            StioError: A save failed.
        """
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        found = self._newest(trainer.args) if checkpoint is None else os.fspath(checkpoint)
        self._trainer, self._resume_from = trainer, found
        own = {name: vars(trainer)[name] for name in _REPLACED if name in vars(trainer)}
        _load_weights_by_stio(trainer)
        try:
            result = trainer.train(resume_from_checkpoint=found, **keywords)
        except BaseException:
            try:
                self._end()
            except Exception as error:
                logger.error("saving failed too: %s", error)  # the first exception is the one to raise
            raise
        finally:
            self._trainer = self._resume_from = self._random = None
            for name in _REPLACED:
                vars(trainer).pop(name, None)
            vars(trainer).update(own)
        return result

    def _newest(self, args: TrainingArguments) -> str | None:
        """Return the newest checkpoint that all processes see. All processes must call it."""
        directory = self._directory(args)
        seen = on_all(args.world_size, lambda: resumable_checkpoints(directory))
        common = set.intersection(*map(set, seen))
        if not common and any(seen):
            raise MismatchError(
                "some processes see a checkpoint and others do not; all of them need the same directory",
                path=directory,
                found=[len(one) for one in seen],
            )
        return next((path for path in reversed(seen[args.process_index]) if path in common), None)

    def wait(self) -> None:
        """Wait until the save under way is durable.

        Raises:
            StioError: It failed, and the error was not raised yet.
        """
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.result()

    # Events of Trainer, in their order.

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> Any:
        """Check for unsupported features; restore the optimizer if Trainer restored the model from our checkpoint."""
        self._due, self._random = False, None
        event = _TrainerEvent(args, state, _plain(control), now)
        self._is_observed = any(on_all(args.world_size, lambda: self._begin_training(event)))
        if self._complete and self._trainer is not None:
            # Trainer would take a step before it checks for the end: it gets no batches.
            setattr(self._trainer, _BATCHES, lambda *arguments, **keywords: ([], None))
        return event.control

    def _begin_training(self, event: _TrainerEvent) -> bool:
        """Return whether other callbacks are to be called after each save."""
        args, state, now = event.args, event.state, event.now
        _require_supported(args, state, now["model"], by_resume=self._trainer is not None)
        self._savers = self._make_savers(sharded=_is_sharded(now["model"]))
        pushes = args.push_to_hub and state.is_world_process_zero and args.hub_strategy != "end"
        self._pushes = HubPushes(args) if pushes else None
        self._training = True
        if state.is_world_process_zero:
            warn_of_higher_steps(self._directory(args), state.global_step)
        self._complete = 0 < state.max_steps <= state.global_step
        if (saved := state.stateful_callbacks.pop(_STATE_KEY, None)) is not None:
            self._restore(event, saved)
        return self._has_observers()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> Any:
        """Save if a save is due, or set the random generators."""
        return self._save_or_restore(_TrainerEvent(args, state, self._take_request(control), now), at_epoch=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> Any:
        """Save if a save is due, or set the random generators."""
        return self._save_or_restore(_TrainerEvent(args, state, self._take_request(control), now), at_epoch=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> Any:
        """Take over a requested save."""
        control = self._take_request(control)
        if control.should_save:
            control.should_save = False
            self._due = not self._complete
        return control

    on_epoch_end = on_step_end

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> Any:
        """Take over the request that Trainer makes right after this event if the model is the best one."""
        if self._training and args.save_strategy == "best" and not isinstance(control, _RequestControl):
            return _RequestControl(**vars(control))
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Save nothing: it is saved, or another callback made Trainer save itself."""
        self._due = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> Any:
        """At the summary of the training: save if a save is due, and wait until it is durable."""
        if self._training and _SUMMARY in (now.get("logs") or {}):
            control = self._finish(_TrainerEvent(args, state, self._take_request(control), now))
        return control

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> Any:
        """Wait for pushes under way."""
        control = self._take_request(control)
        if self._training:  # a subclass of Trainer logs no summary
            control = self._finish(_TrainerEvent(args, state, control, now))
        if self._pushes is not None:
            self._pushes.wait()
        self._end()
        return control

    # Saving.

    def _take_request(self, control: TrainerControl) -> TrainerControl:
        """Take over a request that Trainer made after an evaluation; return an ordinary control."""
        if isinstance(control, _RequestControl) and control.requested:
            self._due = not self._complete
        return _plain(control)

    def _end(self) -> None:
        """Wait for the save under way, and release the staging memory."""
        self._training = False
        try:
            self.wait()
        finally:
            self._savers.close()

    def _finish(self, event: _TrainerEvent) -> TrainerControl:
        """Save if a save is due, and wait until the last save is durable. All processes must call it."""
        args, state, control = event.args, event.state, event.control
        self._training = False

        def wait() -> None:
            try:
                self.wait()
            finally:
                if self._pushes is not None and args.save_total_limit == 1:
                    self._pushes.wait()  # after this event Trainer itself deletes all checkpoints but the best one

        try:
            if self._due:
                control = self._save(event, at_epoch=float(state.epoch or 0).is_integer())
            on_all(args.world_size, wait)
        finally:
            self._savers.close()
        self._record_best(args, state)
        return control

    def _record_best(self, args: TrainingArguments, state: TrainerState) -> None:
        """Record the checkpoint of the best model, as Trainer does when it saves."""
        if args.save_strategy != "no" and state.best_global_step:
            path = os.path.join(self._output(args), f"checkpoint-{state.best_global_step}")
            if (state.best_global_step == state.global_step and self._due) or os.path.isdir(path):
                state.best_model_checkpoint = path

    def _save_or_restore(self, event: _TrainerEvent, *, at_epoch: bool) -> TrainerControl:
        control = self._save(event, at_epoch=at_epoch) if self._due else event.control
        if self._random is not None and self._random_at_epoch == at_epoch:
            set_random_states(self._random)
            self._random = None
        return control

    def _save(self, event: _TrainerEvent, *, at_epoch: bool) -> TrainerControl:
        """Start to save a checkpoint; return when its snapshot is complete. All processes must call it.

        If other callbacks are to be called, it returns when the checkpoint is durable and they were.
        """
        args, state, control = event.args, event.state, event.control
        self._record_best(args, state)
        self._due = False

        def begin() -> dict[str, Any]:
            self.wait()
            return random_states()

        of_ranks = on_all(args.world_size, begin)
        training = {"global_step": state.global_step, "at_epoch": at_epoch, "random": of_ranks}
        if self._trainer is not None:
            self._trainer.store_flos()  # gathers from all processes too
        self._start(event, training)
        if not self._is_observed:
            return control
        on_all(args.world_size, self.wait)
        return control if self._trainer is None else self._trainer.callback_handler.on_save(args, state, control)

    def _has_observers(self) -> bool:
        """Return whether another callback of the trainer is to be called after each save."""
        callbacks = [] if self._trainer is None else self._trainer.callback_handler.callbacks
        return any(
            getattr(one.on_save, "__func__", None) is not TrainerCallback.on_save
            for one in callbacks
            if not isinstance(one, StioCallback)
        )

    def _start(self, event: _TrainerEvent, training: dict[str, Any]) -> None:
        """Save what this process has to save. Of a sharded model all processes save, and the first one publishes it."""
        args, is_sharded = event.args, _is_sharded(event.now["model"])
        starts: list[Callable[[str], PendingSave]] = []
        published: list[PublishedSave] = []
        with ExitStack() as stack:

            def begin() -> str | None:
                publishes = args.process_index == 0 if is_sharded else args.should_save
                if is_sharded or publishes:
                    starts.extend(self._saves_of(event, training))
                if publishes:
                    published.append(stack.enter_context(self._begin(event)))
                return published[0].path if publishes else None

            path = on_all(args.world_size, begin)[0]
            save = published[0] if published else stack.enter_context(JoinedSave(path))
            failed: list[Exception] = []
            for start in starts:  # all of them: the other processes wait for this one in each
                try:
                    save.add(start(save.path))
                except Exception as error:
                    failed.append(error)
            exchange(args.world_size, failed)
        on_all(args.world_size, lambda: self._publish(args, event.state, published[0]) if published else None)
        self._publishing = save

    def _begin(self, event: _TrainerEvent) -> PublishedSave:
        """Return a directory with all files of a checkpoint but those that stio saves."""
        args, state, now = event.args, event.state, event.now
        save = PublishedSave(self._directory(args), state.global_step, durable=self._durability == "full")
        with save:
            _write_model_files(now["model"], save.path)
            if now.get("processing_class") is not None:
                now["processing_class"].save_pretrained(save.path)
            self._describe(event).save_to_json(os.path.join(save.path, TRAINER_STATE))
        return save

    def _saves_of(self, event: _TrainerEvent, training: dict[str, Any]) -> Sequence[Callable[[str], PendingSave]]:
        """Return functions that start to save weights and training state to a directory."""
        savers, weights = self._savers, _weights_of(event.now["model"])
        found: list[Callable[[str], PendingSave]] = []
        if weights is not None:
            # transformers reads the framework from the metadata.
            found.append(lambda path: savers.model.save(weights, path, metadata={"format": "pt"}))
        if self._with_state(event.args):
            plain = to_plain(training | _states_of(event.now))
            found.append(
                lambda path: savers.state.save_state(
                    plain, os.path.join(path, STATE_NAME), filename_pattern=_STATE_PATTERN
                )
            )
        return found

    def _with_state(self, args: TrainingArguments) -> bool:
        return self._save_optimizer and not args.save_only_model

    def _publish(self, args: TrainingArguments, state: TrainerState, save: PublishedSave) -> None:
        """Let a thread commit the checkpoint when its saves are durable."""
        pushes, best, step, epoch = self._pushes, state.best_model_checkpoint, state.global_step, state.epoch

        def push(path: str) -> None:
            if pushes is not None:
                pushes.push(path, step=step, epoch=epoch)

        def protected() -> Collection[str]:
            return [path for path in (*(pushes.under_way() if pushes is not None else ()), best) if path]

        limit = self._keep_last if self._keep_last is not None else args.save_total_limit
        keep_last = limit if limit is not None and limit > 0 else None  # Trainer: -1 and 0 keep all
        save.start(keep_last=keep_last, when_durable=push, protected=protected)

    def _output(self, args: TrainingArguments) -> str:
        return os.fspath(args.output_dir if self._output_dir is None else self._output_dir)

    def _directory(self, args: TrainingArguments) -> str:
        return os.path.abspath(self._output(args))

    def _describe(self, event: _TrainerEvent) -> TrainerState:
        """Return the content of `trainer_state.json`."""
        state, control = event.state, event.control
        callbacks = {**state.stateful_callbacks, type(control).__name__: control.state()}
        if self._trainer is not None:
            exported = [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
            callbacks = dataclasses.replace(state, stateful_callbacks=[*exported, control]).stateful_callbacks
        if self._with_state(event.args):
            callbacks[_STATE_KEY] = {"args": {}, "attributes": {"save_id": uuid.uuid4().hex}}
        return dataclasses.replace(state, stateful_callbacks=callbacks)

    # Resuming.

    def _restore(self, event: _TrainerEvent, saved: Mapping[str, Any]) -> None:
        """Restore all that Trainer does not: it restores the model, its own state and the position in the data.

        Trainer does not tell a callback from which directory it resumes. It must be that of `resume`, or the callback's
        own: the state that Trainer has loaded has the id of a save.
        """
        args, state, now = event.args, event.state, event.now
        checkpoint = self._resume_from or os.path.join(self._directory(args), f"checkpoint-{state.global_step}")
        path = os.path.join(checkpoint, STATE_NAME)
        try:
            training = from_plain(load_state(path))
        except CheckpointNotFoundError as error:
            error.add_note("resume from another directory with StioCallback.resume(trainer, checkpoint)")
            raise
        described = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE))
        is_same_save = described.stateful_callbacks.get(_STATE_KEY) == saved
        if not is_same_save or training["global_step"] != state.global_step:
            raise MismatchError(
                "Trainer resumes from another checkpoint: this training state is of another step, or of another run; "
                "resume with StioCallback.resume(trainer, checkpoint)",
                path=path,
            )
        set_optimizer_state(now["optimizer"], training["optimizer"])
        now["lr_scheduler"].load_state_dict(training["scheduler"])
        if training["scaler"] is not None and (scaler := _scaler_of(now)) is not None:
            scaler.load_state_dict(training["scaler"])
        self._random = states_of_rank(training["random"], args.process_index)
        self._random_at_epoch = training["at_epoch"]


class _RequestControl(TrainerControl):  # type: ignore[misc]  # transformers is not followed by mypy
    """Keeps a request to save for the callback, and does not show it to Trainer.

    With `save_strategy="best"` Trainer decides and saves without an event in between.
    """

    requested = False
    """Whether a save was requested."""

    @property
    def should_save(self) -> bool:
        return False

    @should_save.setter
    def should_save(self, value: bool) -> None:
        self.requested |= bool(value)


def _plain(control: TrainerControl) -> TrainerControl:
    if not isinstance(control, _RequestControl):
        return control
    return TrainerControl(**control.state()["args"])


class _Savers:
    """The savers of the model and of the training state.

    Each has its own staging memory: the sizes of their blocks differ, and memory of another size is released. A budget
    bounds both, so with a budget they are the same.

    Args:
        sharded: Whether all processes save what they hold.
        budget_bytes: See `stio.Saver`.
        **options: See `stio.Saver`.
    """

    def __init__(self, *, sharded: bool = False, budget_bytes: int | str | None, **options: Any) -> None:
        saver = sync.distributed.Saver if sharded else sync.Saver
        make = partial(saver, max_pending=2, budget_bytes=budget_bytes, **options)  # there is one checkpoint at a time
        self.model = make()
        self.state = make() if budget_bytes is None else self.model

    def close(self) -> None:
        """Wait for both, and release the staging memory."""
        try:
            self.model.close()
        finally:
            self.state.close()


def _require_supported(args: TrainingArguments, state: TrainerState, model: nn.Module, *, by_resume: bool) -> None:
    """Require a training that the callback can save.

    Args:
        args: Of the trainer.
        state: Of the trainer.
        model: The model.
        by_resume: Whether `StioCallback.resume` has started the training.

    Raises:
        ValueError: Only Trainer itself can save it, or only `resume` can start it.
    """
    is_sharded, has_adapters = _is_sharded(model), _has_adapters(model)
    has_own_adapters = getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")
    is_found = {
        "DeepSpeed": args.deepspeed,
        "a hyperparameter search": state.is_hyper_param_search,
        "a model with adapters that peft.get_peft_model has not made": not has_adapters and has_own_adapters,
        "a quantized model": not has_adapters and getattr(model, "hf_quantizer", None) is not None,
        "a model that transformers has sharded": getattr(model, "is_distributed_loading_by_transformers", False),
        "FSDP1": not is_sharded and args.fsdp,
        "a model with DTensors that FSDP2 has not made": not is_sharded
        and any(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "a model with adapters under FSDP2": is_sharded and has_adapters,
        "FSDP2 with save_on_each_node=True (False is supported)": is_sharded and args.save_on_each_node,
    }
    for what, is_so in is_found.items():
        if is_so:
            raise ValueError(f"StioCallback: {what} needs Trainer's own saving")
    others = set[str]()
    if args.restore_callback_states_from_checkpoint:
        others = set(state.stateful_callbacks) - {TrainerControl.__name__, _STATE_KEY}
    loads_weights = state.global_step > 0 or args.load_best_model_at_end
    if not by_resume and (is_sharded or others or (loads_weights and _is_converted(model))):
        what = "under FSDP2" if is_sharded else "Trainer itself loads only weights whose names are those of the module"
        what = f"it cannot reach the states of {listed(sorted(others))}" if others else what
        raise ValueError(f"StioCallback: {what}: train with StioCallback.resume(trainer)")


def _has_adapters(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")  # a program with such a model has imported it
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def _is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 shards a module of the model. After an evaluation its parameters may be whole."""
    return any(isinstance(one, FSDPModule) for one in model.modules())


def _load_weights_by_stio(trainer: Trainer) -> None:
    """Let a trainer load weights of the hub's layout: under FSDP, and by the names that transformers gives to files."""

    def load(checkpoint: str, original: Callable[[], Any]) -> Any:
        if any(os.path.isfile(os.path.join(checkpoint, name)) for name in (_WEIGHTS, _WEIGHTS_INDEX)):
            if _is_sharded(trainer.model):
                return sync.distributed.load_into(trainer.model, checkpoint)
            if _is_converted(trainer.model):
                return sync.load_into(getattr(trainer.model, "_orig_mod", trainer.model), checkpoint)
        return original()  # another checkpoint, or FSDP1

    load_checkpoint, load_best = getattr(trainer, _LOAD_CHECKPOINT), getattr(trainer, _LOAD_BEST)
    setattr(
        trainer,
        _LOAD_CHECKPOINT,
        lambda path, *arguments, **keywords: load(path, partial(load_checkpoint, path, *arguments, **keywords)),
    )
    setattr(trainer, _LOAD_BEST, lambda: load(trainer.state.best_model_checkpoint, load_best))


def _write_model_files(model: Any, directory: str) -> None:
    """Write all files for `from_pretrained` except the weights; of adapters the weights too."""
    model = getattr(model, "_orig_mod", model)  # the model inside a compiled one
    if _has_adapters(model):
        # Its weights are small, and only PEFT determines which belong to an adapter.
        model.save_pretrained(directory)
    elif isinstance(model, PreTrainedModel):
        model.save_pretrained(directory, state_dict={})  # config, generation config, its code
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, _WEIGHTS))  # some versions write one without tensors


def _weights_of(model: Any) -> nn.Module | dict[str, torch.Tensor] | None:
    """Return the weights to save, by their names in files; None if `_write_model_files` writes them."""
    model = getattr(model, "_orig_mod", model)
    if _has_adapters(model):
        return None
    if _is_sharded(model) or not _is_converted(model):
        return model  # type: ignore[no-any-return]
    state = model.state_dict()
    for name, source in tied_names(model, state).sources.items():
        if source in state and state[name].is_set_to(state[source]):
            del state[name]
    # Of layers that share weights the file would have them for one of the layers only.
    return (
        views_in_files(FileNames(model), state, may_share=False) or model
    )  # a resume could not convert tensors that are no views


def _is_converted(model: Any) -> bool:
    """Return whether transformers writes weights of a model under other names than those of the module."""
    model = getattr(model, "_orig_mod", model)
    return isinstance(model, PreTrainedModel) and bool(FileNames(model).in_files)


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
