"""PEFT over stio: adapters that are saved, loaded, merged and converted are as over safetensors."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from stio import compat, sync

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# peft reads a name of transformers that is deprecated
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

Compare = Callable[..., Any]
TOKENS = torch.arange(8).reshape(1, 8)

CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, init_lora_weights=False),
    "all layers": lambda: peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head"]),
    "embeddings": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"], save_projection=True),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(TOKENS).logits


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("kind", CONFIGS)
def test_adapter_is_saved_and_loaded(compare: Compare, source: Path, kind: str) -> None:
    def action(folder: Path) -> Any:
        torch.manual_seed(2)
        module = peft.get_peft_model(base(source), CONFIGS[kind]()).eval()
        module.save_pretrained(folder)
        again = peft.PeftModel.from_pretrained(base(source), folder).eval()
        assert torch.equal(logits(again), logits(module))
        return module, again, logits(again)

    compare(action, saves=True)


def test_c465_an_adapter_that_stio_loads(source: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    trained = peft.get_peft_model(base(source), CONFIGS["lora"]()).eval()
    trained.save_pretrained(tmp_path / "adapter")
    module = peft.get_peft_model(base(source), CONFIGS["lora"]()).eval()
    assert not torch.equal(logits(module), logits(trained))
    peft.set_peft_model_state_dict(module, sync.load(tmp_path / "adapter"), adapter_name="default")
    assert torch.equal(logits(module), logits(trained))


def test_an_adapter_of_a_module_is_swapped_followed_and_saved(source: Path, tmp_path: Path) -> None:
    """The calls of docs/howto/adapters.md."""
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        peft.get_peft_model(base(source), CONFIGS["lora"]()).save_pretrained(tmp_path / name)
    module, other = (peft.PeftModel.from_pretrained(base(source), tmp_path / name).eval() for name in ("one", "two"))
    first, addresses = logits(module), [tensor.data_ptr() for tensor in module.parameters()]
    tensors = peft.get_peft_model_state_dict(module, adapter_name="default")
    sync.distributed.load_into(tensors, tmp_path / "two")
    assert torch.equal(logits(module), logits(other)) and not torch.equal(logits(module), first)
    assert [tensor.data_ptr() for tensor in module.parameters()] == addresses

    run = tmp_path / "run" / "step-1"
    with sync.Saver() as saver:
        saver.save(tensors, run / "adapter_model.safetensors").result()
    module.peft_config["default"].save_pretrained(run)
    again = peft.PeftModel.from_pretrained(base(source), run).eval()
    assert torch.equal(logits(again), logits(other))

    sync.save(
        peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base(source), tmp_path / "one")),
        tmp_path / "steps" / "step-1",
    )
    with sync.follow(tensors, tmp_path / "steps"):
        assert torch.equal(logits(module), first)


def test_an_adapter_is_swapped_by_peft(source: Path, tmp_path: Path) -> None:
    for seed, alpha in enumerate((8, 16)):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(base(source), config).save_pretrained(tmp_path / str(alpha))
    module, other = (peft.PeftModel.from_pretrained(base(source), tmp_path / name).eval() for name in ("8", "16"))
    with compat.install():
        hotswap = import_module("peft.utils.hotswap")
        hotswap.hotswap_adapter(module, tmp_path / "16", adapter_name="default")
    assert torch.equal(logits(module), logits(other))


def test_merged_model(compare: Compare, source: Path) -> None:
    def action(folder: Path) -> Any:
        torch.manual_seed(2)
        peft.get_peft_model(base(source), CONFIGS["lora"]()).save_pretrained(folder / "adapter")
        merged = peft.PeftModel.from_pretrained(base(source), folder / "adapter").merge_and_unload()
        merged.save_pretrained(folder / "merged", max_shard_size="20KB")
        return merged, base(folder / "merged")

    compare(action, saves=True)


def test_several_adapters(compare: Compare, source: Path) -> None:
    def action(folder: Path) -> Any:
        torch.manual_seed(2)
        module = peft.get_peft_model(base(source), CONFIGS["lora"](), adapter_name="first")
        module.add_adapter("second", CONFIGS["dora"]())
        module.save_pretrained(folder)
        again = peft.PeftModel.from_pretrained(base(source), folder / "first", adapter_name="first")
        again.load_adapter(folder / "second", adapter_name="second", is_trainable=True)
        again.set_adapter("second")
        return again, logits(again.eval())

    compare(action, saves=True)


def test_auto_model_finds_the_base_model(compare: Compare, source: Path) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)

    def action(folder: Path) -> Any:
        torch.manual_seed(2)
        peft.get_peft_model(base(source), config).save_pretrained(folder)
        return peft.AutoPeftModelForCausalLM.from_pretrained(folder), base(folder)

    compare(action, saves=True)


def test_adapter_of_a_dispatched_model(compare: Compare, source: Path) -> None:
    def action(folder: Path) -> Any:
        torch.manual_seed(2)
        peft.get_peft_model(base(source), CONFIGS["lora"]()).save_pretrained(folder)
        module = transformers.AutoModelForCausalLM.from_pretrained(source, device_map="auto")
        again = peft.PeftModel.from_pretrained(module, folder, low_cpu_mem_usage=True)
        return again, logits(again.eval())

    compare(action, saves=True)
