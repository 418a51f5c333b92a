"""Checkpoints of Lightning's and of transformers' Trainer by older versions, read by the classes that wrote them.

A file of its own: importing the frameworks takes seconds, which other tests have paid in a whole run.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from versions.archive import FILES, unpack
from versions.look import describe_tensors, listing, tensors_of

VERSIONS = sorted(path.name for path in FILES.iterdir())
versions = pytest.mark.parametrize("version", VERSIONS)


@versions
@pytest.mark.parametrize(
    ("name", "generation"), [("lightning", 2), ("lightning-staged", 1), ("lightning-published", 2)]
)
def test_lightning_reads_and_replaces_its_checkpoint(version: str, name: str, generation: int, tmp_path: Path) -> None:
    """Tagged values come back as what they were; the next save removes what is dead."""
    pytest.importorskip("lightning")
    from stio.integrations.lightning import StioCheckpointIO

    root = unpack(FILES / version / f"{name}.tar.xz", tmp_path)
    plugin = StioCheckpointIO(asynchronous=False)
    found = plugin.load_checkpoint(root / "last.ckpt")
    assert found["epoch"] == generation
    assert describe_tensors(found["state_dict"]) == describe_tensors(tensors_of(generation))
    hyperparameters = found["hyper_parameters"]
    assert hyperparameters["path"] == Path("/data/x") and isinstance(hyperparameters["path"], Path)
    assert hyperparameters["set"] == {1} and type(hyperparameters["frozen"]) is frozenset
    assert found["namespace"] == Namespace(a=1, b=[2])
    assert type(found["default"]) is defaultdict and found["default"].default_factory is list
    assert found["array"].dtype == np.int16 and found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert type(found["number"]) is np.float64 and found["number"] == 0.5
    plugin.save_checkpoint(found, root / "last.ckpt")
    assert listing(root) == ["last.ckpt"]


def trainer_of(root: Path, **keywords: Any) -> tuple[Any, Any]:
    """Return a Trainer like that of the archives, and the callback."""
    from integrations.trainer_case import Sentences
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from stio.integrations.transformers import StioCallback

    settings = TrainingArguments(
        str(root / "run"),
        max_steps=2,
        save_steps=1,
        logging_strategy="no",
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=2, n_layer=1, n_head=1))
    callback = StioCallback(**keywords)
    return Trainer(model, settings, train_dataset=Sentences(), callbacks=[callback]), callback


@versions
def test_a_training_goes_on_from_an_older_version(version: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from stio.integrations.transformers import latest_checkpoint

    root = unpack(FILES / version / "trainer.tar.xz", tmp_path)
    assert latest_checkpoint(root / "run") == str(root / "run/checkpoint-1")
    trainer, callback = trainer_of(root)
    callback.resume(trainer)
    assert trainer.state.global_step == 2
    assert latest_checkpoint(root / "run") == str(root / "run/checkpoint-2")


@pytest.mark.matrix
@versions
@pytest.mark.parametrize("name", ["trainer-weights", "trainer-staged", "trainer-published", "trainer-replaced"])
def test_a_training_cleans_up_after_an_older_version(version: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    root = unpack(FILES / version / f"{name}.tar.xz", tmp_path)
    assert any(".stio-" in one for one in listing(root))
    trainer, _ = trainer_of(root, save_optimizer=False)
    trainer.train()
    left = sorted(path.name for path in (root / "run").iterdir())
    # Of a checkpoint without a list of its files nothing is deleted.
    kept = [one for one in left if one.startswith(".stio-kept-")]
    assert len(kept) == (name == "trainer-published")
    assert [one for one in left if one not in kept] == ["checkpoint-1", "checkpoint-2"]
