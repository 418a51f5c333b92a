"""Lightning's real Trainer on the CPU: resumes, removal of old checkpoints, saves beside the training, errors."""

from __future__ import annotations

import errno
import io
import os
import random
import subprocess
import sys
import threading
import warnings
from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkout import python_path
from crash.zygote import Zygote
from integrations.lightning_case import STEPS_PER_EPOCH, Small, Validated, loader, make_trainer
from integrations.test_train_example import run_kills
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from safetensors.torch import save_file
from support import eventually, require_equal
from torch import nn
from torch.utils.data import DataLoader

import stio
from stio import sync
from stio.integrations._training import random_states
from stio.integrations.lightning import RandomStates, StioCheckpointIO, StioModelParallelStrategy
from stio.storage.commit import syscalls as calls

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers:lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",  # of torch, in Lightning's own code
)

ROOT = Path(__file__).parents[2]
Weights = dict[str, torch.Tensor]


class Color(Enum):
    RED = "red"


class AtStep(Callback):
    """Calls a function at the end of a step."""

    def __init__(self, act: Callable[[int], object]) -> None:
        self._act = act

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self._act(trainer.global_step)


def checkpoints(directory: Path, **keywords: Any) -> ModelCheckpoint:
    return ModelCheckpoint(directory, **keywords)


def save_beside(plugin: StioCheckpointIO, checkpoint: dict[str, Any], path: Path) -> None:
    """Save as a `ModelCheckpoint` does in a training."""
    with plugin.beside_training(path):
        plugin.save_checkpoint(checkpoint, path)


def remove_beside(plugin: StioCheckpointIO, path: Path) -> None:
    """Remove as a `ModelCheckpoint` does in a training."""
    with plugin.beside_training(path):
        plugin.remove_checkpoint(path)


def weights_of(module: nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.exists() else []


def visible(directory: Path) -> list[str]:
    return [name for name in names_in(directory) if not name.startswith(".")]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files cannot be made durable."""

    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(calls, "fsync", fsync)


def test_a_plugin_that_has_saved_on_many_ranks_saves_alone(tmp_path: Path) -> None:
    """The plugin of one training may be that of the next one, with another strategy."""
    plugin = StioCheckpointIO()
    checkpoint = {"state_dict": {"w": torch.ones(2)}}
    for number, save in enumerate([plugin.save_on_ranks, plugin.save_checkpoint, plugin.save_on_ranks]):
        with plugin.beside_training(tmp_path / f"{number}.ckpt"):
            save(checkpoint, tmp_path / f"{number}.ckpt")
        kind: Any = sync.Saver if save == plugin.save_checkpoint else sync.distributed.Saver
        assert type(plugin._saver) is kind
    plugin.teardown()
    assert names_in(tmp_path) == ["0.ckpt", "1.ckpt", "2.ckpt"]


def test_a_strategy_needs_the_plugin_of_stio() -> None:
    strategy = StioModelParallelStrategy()
    assert strategy._plugin() is strategy.checkpoint_io
    strategy.checkpoint_io = AsyncCheckpointIO(own := StioCheckpointIO())
    assert strategy._plugin() is own
    strategy.checkpoint_io = TorchCheckpointIO()
    with pytest.raises(TypeError, match="saves by StioCheckpointIO, and not by the plugin TorchCheckpointIO"):
        strategy.setup(Trainer(logger=False, accelerator="cpu"))


def test_a_directory_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "of-lightning.ckpt").mkdir()
    StioCheckpointIO().remove_checkpoint(tmp_path / "of-lightning.ckpt")
    assert "stays: it is a directory" in caplog.text


@pytest.mark.matrix
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_resumed_training_ends_with_the_same_weights(tmp_path: Path, asynchronous: bool) -> None:
    undisturbed = Small()
    make_trainer(tmp_path, TorchCheckpointIO(), enable_checkpointing=False).fit(undisturbed, loader(shuffle=True))

    first = Small()
    plugin = StioCheckpointIO(asynchronous=asynchronous)
    make_trainer(tmp_path, plugin, checkpoints(tmp_path / "c"), epochs=2).fit(first, loader(shuffle=True))
    assert names_in(tmp_path / "c") == ["epoch=1-step=8.ckpt"]
    resumed = Small()
    trainer = make_trainer(
        tmp_path, StioCheckpointIO(asynchronous=asynchronous), checkpoints(tmp_path / "c", save_top_k=-1)
    )
    with pytest.warns(UserWarning, match="exists and is not empty"):
        trainer.fit(resumed, loader(shuffle=True), ckpt_path=tmp_path / "c" / "epoch=1-step=8.ckpt")
    assert trainer.global_step == 4 * STEPS_PER_EPOCH
    require_equal(weights_of(resumed), weights_of(undisturbed))


def test_the_checkpoint_is_what_lightnings_own_would_be(tmp_path: Path) -> None:
    """Both in the same training; in the middle of an epoch, with the states of callbacks."""
    own: list[dict[str, Any]] = []

    class Both(StioCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            TorchCheckpointIO().save_checkpoint(checkpoint, tmp_path / "own.ckpt")
            own.append(torch.load(tmp_path / "own.ckpt", weights_only=False))
            super().save_checkpoint(checkpoint, path, storage_options)

    plugin = Both()
    saving = checkpoints(tmp_path / "c", every_n_train_steps=3, save_top_k=-1, monitor="loss")
    stopping = EarlyStopping("val", patience=9)
    make_trainer(tmp_path, plugin, saving, stopping, epochs=2).fit(
        Validated(rate=0.1, path=Path("/data")), loader(), loader()
    )
    found = [
        plugin.load_checkpoint(tmp_path / "c" / f"epoch={epoch}-step={step}.ckpt") for epoch, step in ((0, 3), (1, 6))
    ]
    assert len(own) == 2
    for one, other in zip(found, own, strict=True):
        require_same(one, other)


def require_same(found: Any, expected: Any, path: str = "") -> None:
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            require_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            require_same(one, other, f"{path}/{number}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), path
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and np.array_equal(found, expected), path
    else:
        assert found == expected, path


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path, trainer_zygote: Zygote) -> None:
    """With dropout and a shuffled loader, so that each random generator must be restored."""
    done = run_kills(trainer_zygote, "lightning_case", tmp_path, "--steps", 4, 8, 15)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["lightning_case", "lightning_best_case"])
def test_killed_20_times(tmp_path: Path, trainer_zygote: Zygote, case: str) -> None:
    done = run_kills(trainer_zygote, case, tmp_path, "--steps", 4, 8, 15, "--kills", 4, "--at-least", 20)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_sharded_ranks_save_and_resume(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "integrations.lightning_sharded", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_two_ranks_resume_with_their_own_generators(tmp_path: Path) -> None:
    """Also: the launcher of forked ranks passes weights in a file, which must be there when its process ends."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "integrations.lightning_ranks", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("equal\n")


def test_a_dict_that_is_no_checkpoint_is_durable_at_once(tmp_path: Path, held: threading.Event) -> None:
    held.set()
    plugin = StioCheckpointIO()
    plugin.save_checkpoint({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    assert names_in(tmp_path) == ["a.ckpt"]


@pytest.mark.matrix
@pytest.mark.parametrize("fn", ["validate", "predict", "load_from_checkpoint"])
def test_c242_only_a_training_gets_the_random_generators(tmp_path: Path, fn: str) -> None:
    module = Validated()
    trainer = make_trainer(tmp_path, StioCheckpointIO(), epochs=1, enable_checkpointing=False)
    trainer.fit(module, loader(shuffle=True), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    seed_everything(5, verbose=False)
    if fn == "load_from_checkpoint":
        before = random_states()
        Validated.load_from_checkpoint(tmp_path / "a.ckpt")  # its `__init__` seeds torch
        require_same(random_states() | {"torch": None}, before | {"torch": None})
        return
    data = DataLoader(loader().dataset, batch_size=4, generator=torch.Generator())
    module.predict_step = lambda *_: torch.zeros(1)
    getattr(trainer, fn)(module, data, ckpt_path=tmp_path / "a.ckpt")
    found = random_states()
    seed_everything(5, verbose=False)
    require_same(found, random_states())


def test_c242_a_resumed_training_gets_the_random_generators(tmp_path: Path) -> None:
    """Python's and numpy's too; what is drawn before the first step changes nothing."""
    drawn: dict[str, list[object]] = {"whole": [], "resumed": []}

    class Draws(Callback):
        def __init__(self, to: list[object]) -> None:
            self.to = to

        def setup(self, *_: object, **__: object) -> None:
            random.random(), np.random.random(), torch.rand(1)

        def on_train_batch_start(self, *_: object) -> None:
            self.to.append((random.random(), np.random.random(), float(torch.rand(1))))

    saving = checkpoints(tmp_path / "c", save_top_k=-1)
    whole = make_trainer(tmp_path, StioCheckpointIO(), saving, Draws(drawn["whole"]), epochs=2)
    whole.fit(Small(), loader(shuffle=True))
    resumed = make_trainer(tmp_path, StioCheckpointIO(), Draws(drawn["resumed"]), epochs=2, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        resumed.fit(Small(), loader(shuffle=True), ckpt_path=tmp_path / "c" / "epoch=0-step=4.ckpt")
    assert len(drawn["whole"]) == 8
    assert drawn["resumed"] == drawn["whole"][4:]


class Dropped(Validated):
    """The weights depend on each random number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].p = 0.5


@pytest.mark.matrix
@pytest.mark.parametrize(
    "keywords",
    [{"check_val_every_n_epoch": 2}, {"val_check_interval": 0.5}, {"val_check_interval": STEPS_PER_EPOCH}, {}],
    ids=str,
)
@pytest.mark.parametrize("at_epoch_end", [None, False])
def test_c242_saved_at_the_end_of_a_validation(tmp_path: Path, keywords: Any, at_epoch_end: bool | None) -> None:
    """Lightning enters the finished epoch again, and draws a seed for batches that nobody takes."""
    directory = tmp_path / "c"

    def saving() -> ModelCheckpoint:
        return checkpoints(directory, save_last=True, save_on_train_epoch_end=at_epoch_end)

    def fit(*callbacks: Callback, epochs: int, **more: Any) -> Dropped:
        module = Dropped()
        trainer = make_trainer(tmp_path, StioCheckpointIO(), *callbacks, epochs=epochs, **keywords)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, loader(shuffle=True), loader(), **more)
        return module

    whole = fit(ModelCheckpoint(tmp_path / "whole"), epochs=4)
    fit(saving(), epochs=2)
    fit(saving(), epochs=4, ckpt_path=directory / "last.ckpt")
    require_equal(sync.load_state(directory / "last.ckpt")["state_dict"], weights_of(whole))


def test_the_generators_of_a_failed_resume_are_forgotten(tmp_path: Path) -> None:
    module = Small()
    trainer = make_trainer(tmp_path, StioCheckpointIO(), epochs=1, enable_checkpointing=False)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module.on_fit_start = lambda: 1 / 0
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader(), ckpt_path=tmp_path / "a.ckpt")
    seeds: list[int] = []
    module.on_fit_start = lambda: None
    module.on_train_start = lambda: seeds.append(torch.initial_seed())
    torch.manual_seed(77)
    trainer.fit(module, loader())
    assert seeds == [77]


def test_a_wrapped_plugin_has_the_generators(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, AsyncCheckpointIO(StioCheckpointIO()), epochs=1, enable_checkpointing=False)
    trainer.fit(Small(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.strategy.teardown()
    assert eventually(lambda: (tmp_path / "a.ckpt").exists())
    assert len(sync.load_state(tmp_path / "a.ckpt")["stio.random"]) == 1


def test_the_directory_of_the_first_checkpoint_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first save makes it; further checkpoints are there when the first one is removed."""
    saving = checkpoints(tmp_path / "new", save_last=True)
    make_trainer(tmp_path, StioCheckpointIO(), saving, epochs=3).fit(Small(), loader())
    assert names_in(tmp_path / "new") == ["epoch=2-step=12.ckpt", "last.ckpt"]
    assert "stays" not in caplog.text


def test_a_rank_that_the_checkpoint_does_not_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, StioCheckpointIO(), epochs=1)
    trainer.state.fn = "fit"
    before = random_states()
    RandomStates().on_load_checkpoint(trainer, Small(), {"stio.random": []})
    require_same(random_states()["python"], before["python"])
    assert "none of rank 0" in caplog.text
    with pytest.raises(stio.FormatError, match="random generators of another form"):
        RandomStates().on_load_checkpoint(trainer, Small(), {"stio.random": [{"python": {}}]})


def test_the_callback_is_for_stio_only(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, TorchCheckpointIO(), epochs=1, enable_checkpointing=False)
    assert sum(isinstance(one, RandomStates) for one in trainer.callbacks) == 1
    trainer.fit(Small(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert "stio.random" not in torch.load(tmp_path / "a.ckpt", weights_only=True)
    code = "import sys, stio.integrations as i; assert i.lightning_callbacks() == [] and 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)  # a real interpreter without torch: what it imports


def test_load_from_checkpoint(tmp_path: Path) -> None:
    module = Small(rate=0.25)
    trainer = make_trainer(tmp_path, StioCheckpointIO(), epochs=1, enable_checkpointing=False)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    found = Small.load_from_checkpoint(tmp_path / "a.ckpt")
    require_equal(weights_of(found), weights_of(module))
    assert found.hparams == {"rate": 0.25}
    found = Small.load_from_checkpoint(str(tmp_path / "a.ckpt"), map_location="cpu", weights_only=True, rate=1.0)
    assert found.hparams == {"rate": 1.0}
    theirs = make_trainer(tmp_path, TorchCheckpointIO(), epochs=1, enable_checkpointing=False)
    theirs.fit(Small(rate=0.5), loader())
    theirs.save_checkpoint(tmp_path / "theirs.ckpt")
    for source in (tmp_path / "theirs.ckpt", io.BytesIO((tmp_path / "theirs.ckpt").read_bytes())):
        assert Small.load_from_checkpoint(source).hparams == {"rate": 0.5}
    with pytest.raises(FileNotFoundError):
        Small.load_from_checkpoint(tmp_path / "missing.ckpt")
    with pytest.raises(TypeError, match="map_location"):
        Small.load_from_checkpoint(tmp_path / "a.ckpt", map_location={"cuda:0": "cpu"})


@pytest.mark.slow
def test_validate_takes_the_best(tmp_path: Path) -> None:
    module = Validated()
    saving = checkpoints(tmp_path / "c", monitor="val", save_top_k=1, save_last=True)
    trainer = make_trainer(tmp_path, StioCheckpointIO(), saving)
    trainer.fit(module, loader(), loader())
    best = sync.load_state(saving.best_model_path)
    with torch.no_grad():
        module.layers[0].weight.zero_()
    found = trainer.validate(module, loader(), ckpt_path="best", verbose=False)
    assert found[0]["val"] == pytest.approx(float(saving.best_model_score))
    require_equal(weights_of(module), best["state_dict"])
    assert len(visible(tmp_path / "c")) == 2
    trainer.fit_loop.max_epochs = 5
    with pytest.warns(UserWarning, match="exists and is not empty"):
        trainer.fit(module, loader(), loader(), ckpt_path="last")
    assert trainer.global_step == 5 * STEPS_PER_EPOCH


def test_the_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, held: threading.Event) -> None:
    """The first save is held till the end of step 3; nothing of it is to be seen till then."""
    seen: list[list[str]] = []

    def act(step: int) -> None:
        seen.append(visible(tmp_path / "c"))
        if step == 3:
            held.set()

    weights: dict[int, Weights] = {}
    module = Small()
    saving = checkpoints(tmp_path / "c", every_n_train_steps=2, save_top_k=-1)
    record = AtStep(lambda step: weights.update({step: weights_of(module)}))
    make_trainer(tmp_path, StioCheckpointIO(), record, saving, AtStep(act), epochs=1).fit(module, loader())
    assert seen[:3] == [[], [], []]
    assert names_in(tmp_path / "c") == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    for step in (2, 4):
        require_equal(sync.load_state(tmp_path / "c" / f"epoch=0-step={step}.ckpt")["state_dict"], weights[step])


def test_an_old_checkpoint_goes_when_the_new_one_is_durable(tmp_path: Path, held: threading.Event) -> None:
    old, new, plugin = tmp_path / "old.ckpt", tmp_path / "new.ckpt", StioCheckpointIO()
    held.set()
    save_beside(plugin, {"state_dict": {}, "n": 1}, old)
    plugin.load_checkpoint(old)  # waits
    held.clear()
    save_beside(plugin, {"state_dict": {}, "n": 2}, new)
    remove_beside(plugin, old)
    assert visible(tmp_path) == ["old.ckpt"]
    held.set()
    plugin.teardown()
    assert names_in(tmp_path) == ["new.ckpt"]
    remove_beside(plugin, new)
    remove_beside(plugin, new)  # is not there
    assert names_in(tmp_path) == []


def test_c242_a_removal_needs_no_further_call(tmp_path: Path, held: threading.Event) -> None:
    """A process that is killed before its next save would leave the old file for ever."""
    old, new, plugin = tmp_path / "old.ckpt", tmp_path / "new.ckpt", StioCheckpointIO()
    held.set()
    save_beside(plugin, {"state_dict": {}, "n": 1}, old)
    plugin.load_checkpoint(old)  # waits
    held.clear()
    save_beside(plugin, {"state_dict": {}, "n": 2}, new)
    remove_beside(plugin, old)
    remove_beside(plugin, old)  # is a no-op
    assert visible(tmp_path) == ["old.ckpt"]
    held.set()
    assert eventually(lambda: names_in(tmp_path) == ["new.ckpt"])
    remove_beside(plugin, new)  # the save has ended
    assert names_in(tmp_path) == []
    plugin.teardown()


def test_what_is_saved_again_is_not_removed(tmp_path: Path, held: threading.Event) -> None:
    file, plugin = tmp_path / "last.ckpt", StioCheckpointIO()
    save_beside(plugin, {"state_dict": {}, "n": 1}, file)
    remove_beside(plugin, file)
    threading.Timer(0.05, held.set).start()  # the second save waits for the first
    save_beside(plugin, {"state_dict": {}, "n": 2}, file)
    plugin.teardown()
    assert plugin.load_checkpoint(file) == {"state_dict": {}, "n": 2}
    save_beside(plugin, {"state_dict": {}, "n": 3}, file)
    remove_beside(plugin, file)
    plugin.teardown()
    assert names_in(tmp_path) == []


@pytest.mark.usefixtures("broken")
def test_an_error_of_a_save_is_raised_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    saving = checkpoints(tmp_path / "c", every_n_train_steps=2)
    last: list[int] = []
    with pytest.raises(stio.StorageError, match="Input/output error"):
        make_trainer(tmp_path, StioCheckpointIO(), AtStep(last.append), saving).fit(Small(), loader())
    assert last[-1] < 4 * STEPS_PER_EPOCH
    (tmp_path / "old.ckpt").touch()
    plugin = StioCheckpointIO()
    save_beside(plugin, {"state_dict": {}, "n": 1}, tmp_path / "new.ckpt")
    with pytest.raises(stio.StorageError):
        remove_beside(plugin, tmp_path / "old.ckpt")  # the save may have failed by now
        plugin.teardown()
    plugin.teardown()
    assert visible(tmp_path) == ["c", "old.ckpt"]


@pytest.mark.usefixtures("broken")
def test_an_error_at_the_end_is_raised_by_fit(tmp_path: Path) -> None:
    saving = checkpoints(tmp_path / "c", every_n_epochs=4)
    with pytest.raises(stio.StorageError, match="Input/output error"):
        make_trainer(tmp_path, StioCheckpointIO(), saving).fit(Small(), loader())
    assert names_in(tmp_path / "c") == []


@pytest.mark.usefixtures("broken")
def test_an_error_is_raised_at_once_when_not_asynchronous(tmp_path: Path) -> None:
    with pytest.raises(stio.StorageError, match="Input/output error"):
        StioCheckpointIO(asynchronous=False).save_checkpoint({"state_dict": {}, "n": 1}, tmp_path / "a.ckpt")


def test_hyperparameters(tmp_path: Path) -> None:
    module = Small(rate=0.1, path=Path("/data"), options=Namespace(deep=[1, {2}]))
    trainer = make_trainer(tmp_path, StioCheckpointIO(), epochs=1, enable_checkpointing=False)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = trainer.strategy.load_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"]
    assert found == {"rate": 0.1, "path": Path("/data"), "options": Namespace(deep=[1, {2}])}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Color.RED, r"state\['hyper_parameters'\]\['odd'\] is a .*Color"),
        (print, r"\['odd'\] is a builtin_function_or_method"),
        ([nn.Linear(1, 1)], r"\['odd'\]\[0\] is a torch.nn.modules.linear.Linear"),
    ],
    ids=["enum", "function", "module"],
)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_cannot_be_saved_is_named(tmp_path: Path, value: object, message: str, asynchronous: bool) -> None:
    plugin = StioCheckpointIO(asynchronous=asynchronous)
    with pytest.raises(TypeError, match=message) as caught:
        plugin.save_checkpoint({"hyper_parameters": {"odd": value}}, tmp_path / "a.ckpt")
    assert caught.value.__notes__ == ["save_hyperparameters(ignore=[...]) leaves it out of the checkpoint"]
    plugin.teardown()
    assert names_in(tmp_path) == []


def test_wrong_calls(tmp_path: Path) -> None:
    plugin = StioCheckpointIO()
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(ValueError, match="local paths"):
        plugin.save_checkpoint({}, "s3://bucket/a.ckpt")
    with pytest.raises(TypeError, match="map_location"):
        plugin.load_checkpoint(tmp_path / "a.ckpt", map_location={"cuda:0": "cpu"})
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="durability"):
        StioCheckpointIO(durability="some")  # type: ignore[arg-type]
    torch.save({"state_dict": {}}, tmp_path / "theirs.ckpt")
    with pytest.raises(stio.FormatError, match=r"file of torch\.save"):
        plugin.load_checkpoint(tmp_path / "theirs.ckpt")
    save_file({"w": torch.ones(1)}, tmp_path / "weights.ckpt")
    with pytest.raises(stio.FormatError) as caught:
        plugin.load_checkpoint(tmp_path / "weights.ckpt")
    assert "loads its own checkpoints only" in caught.value.__notes__[0]


def test_with_a_manifest(tmp_path: Path) -> None:
    plugin = StioCheckpointIO(hash="sha256", durability="none")
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    plugin.teardown()
    assert names_in(tmp_path) == ["a.ckpt", "a.ckpt.manifest.json"]
    assert torch.equal(sync.load_state(tmp_path / "a.ckpt", verify=True)["w"], torch.ones(3))
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert names_in(tmp_path) == []


def test_what_others_wrote_is_not_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    replaced, theirs = tmp_path / "replaced.ckpt", tmp_path / "theirs.ckpt"
    plugin = StioCheckpointIO()
    plugin.save_checkpoint({"state_dict": {}, "n": 1}, replaced)
    plugin.load_checkpoint(replaced)  # waits
    torch.save({"state_dict": {}}, replaced)
    torch.save({"state_dict": {}}, theirs)
    plugin.remove_checkpoint(replaced)
    plugin.remove_checkpoint(theirs)
    plugin.teardown()
    assert names_in(tmp_path) == ["replaced.ckpt", "theirs.ckpt"]
    assert caplog.text.count("stays") == 2


def test_a_checkpoint_of_an_earlier_process_is_removed(tmp_path: Path) -> None:
    StioCheckpointIO(asynchronous=False, hash="sha256").save_checkpoint({"state_dict": {}, "n": 1}, tmp_path / "a.ckpt")
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")
    StioCheckpointIO().remove_checkpoint(tmp_path / "link.ckpt")
    assert names_in(tmp_path) == ["a.ckpt", "a.ckpt.manifest.json"]
    StioCheckpointIO().remove_checkpoint(tmp_path / "a.ckpt")
    assert names_in(tmp_path) == []
