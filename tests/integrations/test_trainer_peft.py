"""Adapters of PEFT under transformers' Trainer: only they are saved, as Trainer does it, and a training resumes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.trainer_case import NUM_STEPS, AtStep, make_model, make_trainer
from safetensors.torch import load_file
from support import require_equal

import stio
from stio.integrations.transformers import StioCallback, latest_checkpoint
from stio.storage.commit import syscalls as calls

peft = pytest.importorskip("peft")

pytestmark = [
    # PEFT looks on the hub for the vocabulary of a model without a name, and warns that it cannot.
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
    # PEFT asks for a property under the name that transformers 5.23 has deprecated.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

ADAPTER = "adapter_model.safetensors"


class Stop(Exception):
    """What stops a training in its middle."""


def stop(step: int) -> None:
    if step == 7:
        raise Stop


def adapted(adapters: tuple[str, ...] = ("default",)) -> Any:
    """Return the tiny model with adapters of its attention, with dropout; the first one is trained."""
    model, torch_state = make_model(), torch.get_rng_state()
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    result = peft.get_peft_model(model, config, adapter_name=adapters[0])
    for name in adapters[1:]:
        result.add_adapter(name, config)
    torch.set_rng_state(torch_state)
    return result


def adapter_of(model: Any, name: str = "default") -> dict[str, torch.Tensor]:
    found = peft.get_peft_model_state_dict(model, adapter_name=name)
    return {key: tensor.clone() for key, tensor in found.items()}


def test_as_trainers_own(tmp_path: Path) -> None:
    make_trainer(tmp_path / "own", [], model=adapted(), save_steps=NUM_STEPS).train()
    trainer = make_trainer(tmp_path / "stio", [StioCallback()], model=adapted(), save_steps=NUM_STEPS)
    trainer.train()
    own, ours = (tmp_path / name / f"checkpoint-{NUM_STEPS}" for name in ("own", "stio"))
    for name in (ADAPTER, "adapter_config.json", "README.md"):
        assert (ours / name).read_bytes() == (own / name).read_bytes(), name
    assert sorted(os.listdir(ours)) == [
        "README.md",
        "adapter_config.json",
        ADAPTER,
        "trainer_state.json",
        "training_state",
    ]
    loaded = peft.PeftModel.from_pretrained(make_model(), ours)
    require_equal(adapter_of(loaded), adapter_of(trainer.model))
    # The optimizer has the adapters only.
    state = stio.sync.load_state(ours / "training_state")["optimizer"]["state"]
    assert len(state) == len(load_file(ours / ADAPTER))


@pytest.mark.parametrize("adapters", [("default",), ("other", "default")])
def test_a_resumed_training_ends_with_the_same_adapters(tmp_path: Path, adapters: tuple[str, ...]) -> None:
    plain = make_trainer(tmp_path / "plain", [], model=adapted(adapters), save_strategy="no")
    start = adapter_of(plain.model, adapters[0])
    plain.train()
    callback = StioCallback(keep_last=1)
    with pytest.raises(Stop):
        callback.resume(make_trainer(tmp_path / "out", [AtStep(stop)], model=adapted(adapters)))
    assert latest_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-6")
    again = make_trainer(tmp_path / "out", [], model=adapted(adapters))
    StioCallback(keep_last=1).resume(again)
    for name in adapters:
        require_equal(adapter_of(again.model, name), adapter_of(plain.model, name))
    trained = adapter_of(plain.model, adapters[0])
    assert any(not torch.equal(tensor, start[name]) for name, tensor in trained.items())
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-10"]


def test_the_best_adapters_are_loaded(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        [StioCallback()],
        model=adapted(),
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        greater_is_better=True,
        load_best_model_at_end=True,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path and best.name != f"checkpoint-{NUM_STEPS}"
    found = adapter_of(trainer.model)
    require_equal(found, load_file(best / ADAPTER))


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(calls, "fsync", fsync)
    with pytest.raises(stio.StorageError, match="Input/output error"):
        make_trainer(tmp_path, [StioCallback()], model=adapted(), save_steps=NUM_STEPS).train()
    assert os.listdir(tmp_path) == []


def test_adapters_that_trainer_cannot_resume_are_refused(tmp_path: Path) -> None:
    model = make_model()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(ValueError, match=r"peft\.get_peft_model"):
        make_trainer(tmp_path, [StioCallback()], model=model).train()
