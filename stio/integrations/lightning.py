"""Checkpoints of Lightning without pickle, written while the training goes on.

    trainer = Trainer(plugins=[StioCheckpointIO()], callbacks=[ModelCheckpoint(every_n_train_steps=100)])
    trainer.fit(module, data)
    trainer.fit(module, data, ckpt_path="last")

The dict that Lightning makes becomes a nested state: one file for each checkpoint, with the name that Lightning chose
(`.ckpt`). Lightning removes an old checkpoint as soon as it has started to save a new one. Here the removal waits until
the new one is durable, so a process that is killed at any time leaves a complete checkpoint.

Lightning's interface is synchronous: a file exists when the call returns. So a training goes on during a save only
where the caller does not look at the file: Lightning's own `ModelCheckpoint` saves, in a training, with loggers that do
not read checkpoints. `ModelCheckpoint` itself asks whether a name is taken. A save that is pending counts as a file,
and a file that is to be removed does not. Each other save is durable when the call returns.

The random generators of each rank are part of a checkpoint, so a training with dropout resumes bit for bit. Lightning
saves by the plugin of the first rank only, so the callback `RandomStates` saves them. Lightning finds it by the entry
point of stio's distribution.

A module that FSDP2 shards, under `ModelParallelStrategy`, is saved by all ranks into one such file: see
`StioModelParallelStrategy`.

This module replaces functions of Lightning that are not all public. Of `ModelCheckpoint` those that save, remove and
look for a file; without stio's plugin they call the originals. And the one by which `load_from_checkpoint` reads a
file: it waits for a save of the file, and files that stio saved are read by stio; other files, and other sources, go to
the original.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from stio import sync
from stio.errors import FormatError, StioError, install_command
from stio.format.state import STATE_KEY
from stio.integrations._training import (
    exchange,
    from_plain,
    gather,
    on_all,
    random_states,
    set_random_states,
    states_of_rank,
    to_plain,
)
from stio.runtime import Operation
from stio.saving import PendingSave, SaveOptions
from stio.storage.commit import SingleFile, WrittenFiles
from stio.sync import load_state
from stio.sync import open as open_checkpoint

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.core import saving as lightning_saving
    from lightning.pytorch.loggers import Logger, TensorBoardLogger
    from lightning.pytorch.plugins import CheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy
except ModuleNotFoundError as error:
    raise ImportError(f"StioCheckpointIO is a plugin of lightning: {install_command('lightning')}") from error

__all__ = ["RandomStates", "StioCheckpointIO", "StioModelParallelStrategy"]

logger = logging.getLogger("stio")

_RANDOM = "stio.random"
"""Key of a checkpoint: the states of the random generators, by rank."""

_SHARDED = ("state_dict", "optimizer_states")
"""Keys of a checkpoint whose tensors may be sharded over ranks."""


_plugins: weakref.WeakSet[StioCheckpointIO] = weakref.WeakSet()
"""All plugins of this process: `load_from_checkpoint` knows none."""


@dataclass(slots=True, eq=False)
class _Save:
    """A save under way."""

    pending: PendingSave
    file: str
    removals: dict[str, Operation[None]] = field(default_factory=dict)
    """By file that Lightning has removed since, what waits for the save, then removes it."""


class StioCheckpointIO(CheckpointIO):  # type: ignore[misc]  # lightning is not followed by mypy
    """Saves and loads the checkpoints of Lightning: `Trainer(plugins=[StioCheckpointIO()])`.

    `stio.load_state` reads such a checkpoint too. Paths, sets, namespaces and default dicts are stored as
    tagged dicts. Loading restores them and executes nothing. A value of another type, for example an enum or
    an object among the hyperparameters, raises an error that names its path, before anything is written.

    A save by Lightning's `ModelCheckpoint` in a training returns when its snapshot is complete, and the training goes
    on. The file appears when it is durable; `trainer.strategy.checkpoint_io.collect()` waits for that. If such a save
    fails, the next call raises the error, at the latest the end of the training, which waits for saves under way
    before it calls `on_train_end` and `on_exception` of callbacks.

    All other saves are durable when the call returns: `trainer.save_checkpoint`, the save that SLURM's signal causes,
    saves outside of a training, those of subclasses of `ModelCheckpoint`, with `save_last="link"`, and with a logger
    that reads checkpoints (`log_model`, or a logger of yours with `after_save_checkpoint`).

    A resumed training has the random generators of each rank as they were at the save: Python's, numpy's, torch's, and
    those of CUDA devices. With a checkpoint at the end of an epoch it therefore ends with the weights of an undisturbed
    training, bit for bit. In the middle of an epoch Lightning itself does not restore the place in the data, unless the
    loader has a state. `validate`, `test` and `predict` do not restore the generators.

    It supports strategies that write one file from one process: a single device, DDP. For modules that are sharded over
    ranks use `StioModelParallelStrategy`. It needs no `AsyncCheckpointIO` around it. Paths are local. It does not read
    files of `torch.save`. After an import of this module, `load_from_checkpoint` of a LightningModule reads these
    checkpoints too: to the CPU, or to the device that `map_location` names.

    Args:
        asynchronous: Whether training goes on while a checkpoint is written.
        budget_bytes: See `stio.Saver`.
        **keywords: The other keywords of `stio.save`.

    Raises:
        TypeError: `stio.save` does not have a keyword, or its value has the wrong type.
        ValueError: The value of a keyword is out of range.
    """

    def __init__(self, *, asynchronous: bool = True, budget_bytes: int | str | None = None, **keywords: Any) -> None:
        super().__init__()
        self._asynchronous = asynchronous
        self._budget_bytes = budget_bytes
        self._keywords = keywords
        self._saver: sync.Saver | None = None
        self._on_ranks = False
        """Whether all ranks save together; then they have to raise the same errors at the same calls."""
        self._new_saver().close()  # raises for wrong keywords
        self._under_way: _Save | None = None  # one at a time: the saver waits for the one before
        self.trains = False
        """Whether a training has begun and not ended. Else saves in `beside_training` return when they are durable."""
        self._beside: str | None = None
        """The file that may be saved or removed while the training goes on."""
        _plugins.add(self)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: The dict of Lightning.
            path: The file; missing directories are created.
            storage_options: Not supported.

        Raises:
            TypeError: A value cannot be stored in a nested state (the message names it), or `storage_options` is given.
            ValueError: The path is a URL.
            StioError: This save failed, or an earlier one whose error was not raised yet.
        """
        if storage_options is not None:
            raise TypeError("StioCheckpointIO takes no storage_options; give keywords of stio.save to the class")
        self._save(checkpoint, path, on_ranks=False)

    def save_on_ranks(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Save a checkpoint whose tensors are sharded over ranks; all of them call this. See `save_checkpoint`."""
        self._save(checkpoint, path, on_ranks=True)

    def collect(self) -> None:
        """Wait until all saves are durable.

        Raises:
            StioError: A save failed, and its error was not raised yet.
        """
        failed = self._failure(wait=True)
        if failed:
            raise failed.pop()  # its traceback refers to this frame, which must not refer to it

    @contextmanager
    def beside_training(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Let the training go on while this file, and no other, is saved or removed by calls in the block."""
        before, self._beside = self._beside, _local(path)
        try:
            yield
        finally:
            self._beside = before

    def expects(self, path: str | os.PathLike[str]) -> bool | None:
        """Return whether a file will exist when all saves and removals are complete; None if none of them is of it."""
        file, save = _local(path), self._under_way
        if save is None or file not in (save.file, *save.removals):
            return None
        return file not in save.removals

    def _save(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], *, on_ranks: bool) -> None:
        file = _local(path)
        if on_ranks != self._on_ranks:  # the savers of both are not the same
            self._close()
            self._on_ranks = on_ranks
        is_beside = self._asynchronous and file == self._beside
        earlier = self._failure(wait=True)
        where = SingleFile(file, replaces_link=True)  # as Lightning: what the link leads to is another checkpoint
        try:
            state = to_plain(checkpoint)
            if is_beside:
                if self._saver is None:
                    self._saver = self._new_saver()
                self._under_way = _Save(self._saver.save_state(state, where), file)
            else:
                save = sync.distributed.save if on_ranks else sync.save_state
                save(state, where, budget_bytes=self._budget_bytes, **self._keywords)
        except BaseException as error:
            _advise(error)
            if earlier:
                logger.error("an earlier save failed too: %s", str(earlier[0]))
            raise
        if earlier:
            raise earlier.pop()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
        state: Any | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint; waits for saves under way.

        Args:
            path: A file that this class saved.
            map_location: Device to load to. None, or a function, means the CPU. A dict is not supported.
            weights_only: Has no effect: nothing is ever executed.
            state: Has no effect; Lightning applies the returned dict.

        Raises:
            TypeError: `map_location` is not a device.
            CheckpointNotFoundError: There is no such file; it is a `FileNotFoundError`.
            StioError: See `stio.load_state`; or an earlier save failed, and its error was not raised yet.
        """
        self.collect()
        return _load(_local(path), map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, when all saves under way are durable. A missing file is no error.

        Only a checkpoint of this class is removed. Another file stays, and a warning names it.

        Raises:
            StioError: The operating system reported an error, or an earlier save failed and did not raise it yet.
        """
        file = _local(path)
        is_beside = file == self._beside
        # On many ranks only the first one is called.
        if not self._on_ranks and (failed := self._failure(wait=not is_beside)):
            raise failed.pop()
        save = self._under_way
        if save is None:
            _remove(file)
        elif file not in save.removals:
            removal: Operation[None] = Operation(
                lambda _: _remove_after(save.pending, file),
                name="remove",
                exit_patience=SaveOptions.EXIT_PATIENCE_SECONDS,
            )
            save.removals[file] = removal.start()
            if not is_beside:
                removal.result()

    def teardown(self) -> None:
        """Wait for saves under way, and release the staging memory.

        Raises:
            StioError: A save failed, and its error was not raised yet.
        """
        self.trains = False
        self._close()

    def _close(self) -> None:
        try:
            self.collect()
        finally:
            saver, self._saver = self._saver, None
            if saver is not None:
                saver.close()

    def _new_saver(self) -> sync.Saver:
        kind: type[sync.Saver] = sync.distributed.Saver if self._on_ranks else sync.Saver
        return kind(budget_bytes=self._budget_bytes, **self._keywords)

    def _failure(self, *, wait: bool) -> list[Exception]:
        """Collect a save that has ended, with the removals of files that it replaces; return its error, if it has one.

        A signal's handler may call this again.
        """
        save = self._under_way
        if save is None or not (wait or save.pending.done()):
            return []
        failed: list[Exception] = []
        try:
            save.pending.result()
            for removal in list(save.removals.values()):
                removal.result()
        except Exception as error:
            failed.append(error)  # the files that it should replace stay
        if self._under_way is save:  # otherwise the handler has collected it
            self._under_way = None
        return failed


def _remove_after(save: PendingSave, file: str) -> None:
    """Delete a checkpoint once the save that replaces it is durable; it stays if that fails."""
    try:
        save.result()
    except Exception:
        return  # `_failure` returns it
    _remove(file)


def _remove(file: str) -> None:
    """Delete a checkpoint that `StioCheckpointIO` saved, in this process or an earlier one."""
    written = WrittenFiles.of_file(file)
    is_directory = os.path.isdir(file)
    if is_directory or (written.files and not _is_checkpoint(file)):
        what = "a directory, and no file" if is_directory else "no checkpoint"
        logger.warning("%s stays: it is %s that StioCheckpointIO saved", file, what)
        return
    if written.files:
        logger.info("%s is deleted, as Lightning requests", file)
    written.remove()


class StioModelParallelStrategy(ModelParallelStrategy):  # type: ignore[misc]  # lightning is not followed by mypy
    """Lightning's strategy for FSDP2, with checkpoints that all ranks save into one file while the training goes on.

        trainer = Trainer(strategy=StioModelParallelStrategy(data_parallel_size=8, tensor_parallel_size=1))

    Each rank writes what it holds, and nothing is gathered. The file has the layout of `StioCheckpointIO`, with whole
    tensors: any number of ranks resumes from it. All ranks need one directory. What is no weight and no state of an
    optimizer is that of the first rank. Directories that Lightning itself has saved are read by Lightning.

    Args:
        *arguments: See `lightning.pytorch.strategies.ModelParallelStrategy`.
        checkpoint_io: Saves; by default `StioCheckpointIO()`. One among the plugins of the trainer has priority.
        **keywords: See `lightning.pytorch.strategies.ModelParallelStrategy`. `save_distributed_checkpoint` has no
            effect: a checkpoint is one file, and is not gathered.
    """

    def __init__(self, *arguments: Any, checkpoint_io: StioCheckpointIO | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._save_distributed_checkpoint = True  # each rank has what it holds, and not the first one all
        self.checkpoint_io = StioCheckpointIO() if checkpoint_io is None else checkpoint_io

    def setup(self, trainer: Trainer) -> None:
        """Set up as Lightning does.

        Raises:
            TypeError: The trainer has another plugin for checkpoints than `StioCheckpointIO`.
        """
        self._plugin()
        super().setup(trainer)

    def _plugin(self) -> StioCheckpointIO:
        found = _unwrapped(self.checkpoint_io)
        if found is None:
            kind = type(self.checkpoint_io).__name__
            raise TypeError(f"StioModelParallelStrategy saves by StioCheckpointIO, and not by the plugin {kind}")
        return found

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; all ranks call this. See `StioCheckpointIO.save_checkpoint`."""
        if storage_options is not None:
            raise TypeError("StioModelParallelStrategy takes no storage_options")
        plugin = self._plugin()
        sharded = {key: value for key, value in checkpoint.items() if key in _SHARDED}
        rest = {key: value for key, value in checkpoint.items() if key not in _SHARDED}
        earlier = plugin._failure(wait=True)
        of_ranks = on_all(
            self.world_size, lambda: b"" if self.global_rank else pickle.dumps((os.fspath(filepath), rest))
        )
        path, of_first = pickle.loads(of_ranks[0])
        plugin.save_on_ranks({**of_first, **sharded}, path)
        exchange(self.world_size, earlier)  # an earlier save that failed on one rank is an error on all

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint into the sharded module and its optimizers; return the rest of it."""
        path = self.broadcast(os.fspath(checkpoint_path))
        if os.path.isdir(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            return loaded
        state_dict = import_module("torch.distributed.checkpoint.state_dict")
        # Each rank copies its part out of mapped files.
        whole = state_dict.StateDictOptions(full_state_dict=True, strict=self.lightning_module.strict_loading)
        checkpoint: dict[str, Any] = {}
        on_all(self.world_size, lambda: checkpoint.update(self._plugin().load_checkpoint(path)))
        state_dict.set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=whole)
        for optimizer, saved in zip(self.optimizers, checkpoint.pop("optimizer_states", ()), strict=False):
            state_dict.set_optimizer_state_dict(self.model, optimizer, saved, options=whole)
        return checkpoint

    def teardown(self) -> None:
        """Wait for saves under way. Lightning's strategy does not."""
        try:
            super().teardown()
        finally:
            self.checkpoint_io.teardown()


class RandomStates(Callback):  # type: ignore[misc]  # lightning is not followed by mypy
    """Saves and restores the random generators of each rank. Every Trainer with `StioCheckpointIO` has one.

    It saves those of Python, numpy, torch, and torch's CUDA devices. Saving is a collective call if there are several
    ranks, as Lightning's `save_checkpoint` is. A rank that the checkpoint does not have goes on with the generators
    that it has, after a warning. Only with this callback does a training go on while a checkpoint is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._restored: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the first callback tell the plugin when the training begins and ends."""
        if stage == "fit" and _plugin_of(trainer) is not None:
            others = [one for one in trainer.callbacks if not isinstance(one, _TrainingEnds)]
            trainer.callbacks = [_TrainingEnds(), *others]  # a new list: Lightning iterates over the old one

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states of all ranks."""
        if _unwrapped(trainer.strategy.checkpoint_io) is None or _RANDOM in checkpoint:
            return
        is_alone = trainer.world_size == 1 or not torch.distributed.is_initialized()
        checkpoint[_RANDOM] = gather(1 if is_alone else trainer.world_size, random_states())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore this rank's states if a training resumes."""
        states = checkpoint.pop(_RANDOM, None)
        if states is not None and trainer.state.fn == "fit":
            self._restored = states_of_rank(states, trainer.global_rank)
            self._restore()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore them again: strategy setup, or skipping batches of a partly finished epoch, may have used them."""
        self._restore()

    on_train_epoch_end = on_fit_start

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Drop them: the training goes on, or has ended, and they are not for a later one."""
        self._restored = None

    on_exception = teardown = on_train_batch_start

    def _restore(self) -> None:
        if self._restored is None:
            return
        try:
            set_random_states(self._restored)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FormatError(f"the checkpoint holds random generators of another form: {error}") from error


class _TrainingEnds(Callback):  # type: ignore[misc]  # lightning is not followed by mypy
    """Waits for all saves when a training ends, before other callbacks look for the files."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (plugin := _plugin_of(trainer)) is not None:
            plugin.trains = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (plugin := _plugin_of(trainer)) is not None:
            plugin.trains = False
            plugin.collect()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self.on_train_end(trainer, pl_module)
        except Exception as error:
            logger.error("saving failed too: %s", error)  # the first exception is the one to raise


def _plugin_of(trainer: Trainer) -> StioCheckpointIO | None:
    """Return the plugin of a trainer, if it is stio's and is not inside another one."""
    plugin = trainer.strategy.checkpoint_io
    return plugin if isinstance(plugin, StioCheckpointIO) else None


def _is_unnoticed(callback: ModelCheckpoint, trainer: Trainer) -> bool:
    """Return whether nothing looks at a file of this callback right after it was saved or removed.

    A subclass may do so. A link may not point to a missing file: a training that is resumed would not see it.
    """
    return (
        type(callback) is ModelCheckpoint
        and callback.save_last != "link"
        and not any(_reads_checkpoints(one) for one in trainer.loggers)
    )


def _reads_checkpoints(one: Logger) -> bool:
    called = getattr(type(one), "after_save_checkpoint", None)
    if called in (Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint):
        return False  # they do nothing
    is_lightnings = type(one).__module__.startswith("lightning.")
    return not (is_lightnings and getattr(one, "_log_model", True) is False)


def _beside_training(original: Callable[..., None]) -> Callable[..., None]:
    """Return the function by which a `ModelCheckpoint` saves or removes a file, for trainings that go on meanwhile."""

    @functools.wraps(original)
    def call(self: ModelCheckpoint, trainer: Trainer, filepath: str) -> None:
        plugin = _plugin_of(trainer)
        if plugin is None or not plugin.trains or not _is_unnoticed(self, trainer):
            original(self, trainer, filepath)
            return
        with plugin.beside_training(filepath):
            original(self, trainer, filepath)

    return call


def _with_saves_under_way(original: Callable[..., bool]) -> Callable[..., bool]:
    """Return the function by which a `ModelCheckpoint` looks for a file, for files that are not there yet."""

    @functools.wraps(original)
    def file_exists(self: ModelCheckpoint, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        plugin = _plugin_of(trainer)
        if plugin is None or "://" in os.fspath(filepath):
            return original(self, filepath, trainer)
        found = plugin.expects(filepath)
        # As Lightning: the first rank decides, since it saves.
        return bool(trainer.strategy.broadcast(self._fs.exists(filepath) if found is None else found))

    return file_exists


ModelCheckpoint._save_checkpoint = _beside_training(ModelCheckpoint._save_checkpoint)
ModelCheckpoint._remove_checkpoint = _beside_training(ModelCheckpoint._remove_checkpoint)
ModelCheckpoint.file_exists = _with_saves_under_way(ModelCheckpoint.file_exists)


def _unwrapped(plugin: Any) -> StioCheckpointIO | None:
    """Return stio's plugin, which may be inside others; None if it is another one."""
    while not isinstance(plugin, StioCheckpointIO) and hasattr(plugin, "checkpoint_io"):
        plugin = plugin.checkpoint_io
    return plugin if isinstance(plugin, StioCheckpointIO) else None


def _advise(error: BaseException) -> None:
    if isinstance(error, TypeError) and "hyper_parameters" in str(error):
        error.add_note("save_hyperparameters(ignore=[...]) leaves it out of the checkpoint")


def _load(file: str, map_location: Any) -> dict[str, Any]:
    """Load a checkpoint; see `StioCheckpointIO.load_checkpoint`."""
    if not (map_location is None or isinstance(map_location, str | torch.device) or callable(map_location)):
        raise TypeError(f"map_location must be a device, not {type(map_location).__name__}")
    device = "cpu" if map_location is None or callable(map_location) else map_location
    try:
        return from_plain(load_state(file, device=device))  # type: ignore[no-any-return]
    except FormatError as error:
        error.add_note(
            "StioCheckpointIO loads its own checkpoints only. It makes one of a checkpoint of torch.save by "
            "`StioCheckpointIO(asynchronous=False).save_checkpoint(torch.load(OLD, map_location='cpu'), NEW)`"
        )
        raise


def _reads_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that reads a file for `load_from_checkpoint`, with stio for the files of stio."""

    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | Path) and "://" not in str(path_or_url):
            for plugin in list(_plugins):
                if plugin.expects(path_or_url) is not None:
                    plugin.collect()  # otherwise the file may be missing, or an older one
        if isinstance(path_or_url, str | Path) and os.path.isfile(path_or_url) and _is_checkpoint(str(path_or_url)):
            return _load(str(path_or_url), map_location)
        return original(path_or_url, map_location=map_location, weights_only=weights_only)

    return load


lightning_saving.pl_load = _reads_own(lightning_saving.pl_load)


def _is_checkpoint(file: str) -> bool:
    """Return whether a file holds a nested state of stio."""
    try:
        with open_checkpoint(file) as checkpoint:
            return STATE_KEY in checkpoint.metadata
    except StioError:
        return False


def _local(path: str | os.PathLike[str]) -> str:
    """Return the path of a file, with the links to its directory resolved: one file has one path."""
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(f"StioCheckpointIO saves to local paths, not to {text}")
    folder, name = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(folder), name)
