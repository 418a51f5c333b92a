"""transformers over stio: `from_pretrained` and `save_pretrained` give what they give over safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

Compare = Callable[..., Any]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
TOKENS = torch.arange(8).reshape(1, 8)


def model(seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options)).eval()


def loaded(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(TOKENS).logits


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in one file, written by safetensors."""
    model().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A checkpoint in many files with an index, written by safetensors."""
    model().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    return tmp_path / "shards"


# Saves.


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}, {"variant": "fp16"}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained(compare: Compare, options: dict[str, Any], tied: bool) -> None:
    def action(folder: Path) -> None:
        model(tie_word_embeddings=tied).save_pretrained(folder, **options)

    compare(action, loads=False, saves=True)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_save_pretrained_of_a_dtype(compare: Compare, dtype: torch.dtype) -> None:
    compare(lambda folder: model().to(dtype).save_pretrained(folder), loads=False, saves=True)


def test_a_second_save_replaces_shards_by_one_file(compare: Compare) -> None:
    def action(folder: Path) -> None:
        model().save_pretrained(folder, max_shard_size="20KB")
        model(seed=2).save_pretrained(folder)
        assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]

    compare(action, loads=False, saves=True)


# Loads.


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": "auto"},
        {"device_map": "cpu"},
        {"device_map": "auto"},
        {"low_cpu_mem_usage": True},
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["source", "shards"])
def test_from_pretrained(compare: Compare, request: pytest.FixtureRequest, kind: str, options: dict[str, Any]) -> None:
    path = request.getfixturevalue(kind)

    def action(folder: Path) -> Any:
        module = loaded(path, **options)
        return module, logits(module)

    compare(action)


def test_tied_weights_are_tied_again(compare: Compare, tmp_path: Path) -> None:
    model(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")

    def action(folder: Path) -> Any:
        module = loaded(tmp_path / "tied")
        assert module.lm_head.weight is module.model.embed_tokens.weight
        return module, logits(module)

    compare(action)


def test_variant(compare: Compare, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "source", variant="fp16", max_shard_size="20KB")
    compare(lambda folder: loaded(tmp_path / "source", variant="fp16"))


def test_another_class_and_missing_and_unknown_weights(compare: Compare, source: Path) -> None:
    def action(folder: Path) -> Any:
        torch.manual_seed(3)  # for the weights that the checkpoint lacks
        module, report = transformers.LlamaForSequenceClassification.from_pretrained(source, output_loading_info=True)
        assert report["missing_keys"]
        return module, {
            name: sorted(map(str, found)) for name, found in report.items() if isinstance(found, (list, set))
        }

    compare(action)


def test_sizes_that_differ_are_refused_with_the_same_error(compare: Compare, source: Path) -> None:
    def action(folder: Path) -> Any:
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes") as error:
            loaded(source, vocab_size=65)
        return str(error.value)

    compare(action)


@pytest.mark.slow
def test_a_state_dict_of_the_caller_is_saved_and_loaded(compare: Compare) -> None:
    def action(folder: Path) -> Any:
        module = model()
        state_dict = {name: value * 2 for name, value in module.state_dict().items()}
        module.save_pretrained(folder, state_dict=state_dict)
        return loaded(folder)

    compare(action, saves=True)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["source", "shards"])
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_weights_offloaded_to_disk(compare: Compare, request: pytest.FixtureRequest, kind: str) -> None:
    pytest.importorskip("accelerate")
    path = request.getfixturevalue(kind)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    places |= {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(SIZES["num_hidden_layers"])}

    def action(folder: Path) -> Any:
        module = loaded(path, device_map=places, offload_folder=folder)
        assert module.lm_head.weight.is_meta
        result = logits(module)
        module.save_pretrained(folder / "again")  # weights on disk are read for it
        return module, result

    compare(action, saves=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_weights_that_are_converted_on_loading(compare: Compare, tmp_path: Path, is_offloaded: bool) -> None:
    """A mixture of experts: the file has a tensor for each expert, the module one for all."""
    pytest.importorskip("accelerate")
    torch.manual_seed(1)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=3)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "source", max_shard_size="30KB")

    def action(folder: Path) -> Any:
        if is_offloaded:  # not as the files have them: written to the folder
            module = loaded(tmp_path / "source", device_map={"model": "disk", "lm_head": "cpu"}, offload_folder=folder)
            assert list(folder.rglob("*.safetensors"))
        else:
            module = loaded(tmp_path / "source")
            module.save_pretrained(folder)
        return module, logits(module)

    compare(action, saves=True)


# Quantised.


@pytest.mark.slow
def test_a_checkpoint_of_float8_blocks_is_dequantised(compare: Compare, tmp_path: Path) -> None:
    """The layout of fine-grained FP8, of which transformers makes BF16 where there is no GPU."""
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file, save_file

    model().to(torch.bfloat16).save_pretrained(tmp_path / "fp8")
    weights = load_file(tmp_path / "fp8" / "model.safetensors")
    for name, weight in list(weights.items()):
        if "_proj" in name:
            scale = weight.abs().amax().float() / 448
            weights[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            weights[name.replace("weight", "weight_scale_inv")] = scale.reshape(1, 1)
    save_file(weights, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))

    def action(folder: Path) -> Any:
        module = loaded(tmp_path / "fp8")
        assert module.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
        return module, logits(module)

    compare(action)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.filterwarnings("ignore")  # of torchao
def test_torchao(compare: Compare, source: Path, name: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(getattr(torchao, name)())

    def action(folder: Path) -> Any:
        module = loaded(source, quantization_config=config, dtype=torch.float32)
        module.save_pretrained(folder / "quantised")
        again = loaded(folder / "quantised")
        return module, logits(module), again, logits(again)

    compare(action, saves=True)


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors
def test_compressed_tensors(compare: Compare, tmp_path: Path) -> None:
    """Weights of 8 bits with a scale for each row."""
    pytest.importorskip("compressed_tensors")
    from safetensors.torch import load_file, save_file

    model().save_pretrained(tmp_path / "int8")
    weights = load_file(tmp_path / "int8" / "model.safetensors")
    for name, weight in list(weights.items()):
        if "_proj" in name:
            scale = weight.abs().amax(1, keepdim=True) / 127
            weights[name] = (weight / scale).round().to(torch.int8)
            weights[name.replace("weight", "weight_scale")] = scale
    save_file(weights, tmp_path / "int8" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    weight = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weight, "input_activations": inputs}},
    }
    (tmp_path / "int8" / "config.json").write_text(json.dumps(config))

    def action(folder: Path) -> Any:
        module = loaded(tmp_path / "int8")
        return module, logits(module)

    compare(action)


# Adapters, and the Trainer.


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_adapters_of_a_model(compare: Compare, source: Path) -> None:
    peft = pytest.importorskip("peft")

    def action(folder: Path) -> Any:
        module = loaded(source)
        module.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), "first")
        module.save_pretrained(folder / "adapter")
        again = loaded(source)
        again.load_adapter(str(folder / "adapter"), "second")
        return module, again, logits(again)

    compare(action, saves=True)


@pytest.mark.slow
def test_trainer_saves_and_resumes(compare: Compare, source: Path) -> None:
    pytest.importorskip("accelerate")

    def trainer(folder: Path, steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=1, use_cpu=True,
            report_to=[], disable_tqdm=True, seed=4,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in torch.arange(48).reshape(6, 8)]
        return transformers.Trainer(loaded(source), arguments, train_dataset=rows)

    def action(folder: Path) -> Any:
        trainer(folder, 2).train()
        resumed = trainer(folder, 4)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        files = ("model.safetensors", "config.json")
        for path in [path for path in folder.rglob("*") if path.is_file() and path.name not in files]:
            path.unlink()  # the times of the run are in the others
        return resumed.model

    compare(action, saves=True)
