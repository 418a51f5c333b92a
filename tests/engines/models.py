"""Small checkpoints that vLLM serves, in each layout that directories of the hub have."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 256
INDEX = "model.safetensors.index.json"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}

MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def weights_of(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, with the names of the hub."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    width, inner = config["hidden_size"], config["intermediate_size"]
    narrow = width * config["num_key_value_heads"] // config["num_attention_heads"]
    tensors = {"model.embed_tokens.weight": made(VOCABULARY, width)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", width), ("k", narrow), ("v", narrow), ("o", width)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = made(rows, width)
        if experts := config.get("num_local_experts"):
            tensors[f"{at}.block_sparse_moe.gate.weight"] = made(experts, width)
            for expert in range(experts):
                for name, shape in (("w1", (inner, width)), ("w2", (width, inner)), ("w3", (inner, width))):
                    tensors[f"{at}.block_sparse_moe.experts.{expert}.{name}.weight"] = made(*shape)
        else:
            for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
                tensors[f"{at}.mlp.{name}_proj.weight"] = made(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = 1 + made(width)
    tensors["model.norm.weight"] = 1 + made(width)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = made(VOCABULARY, width)
    return tensors


def quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint whose layers have whole numbers and a scale for each row, as compressed-tensors saves it."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        found[name] = (tensor.float() / scale).round().to(torch.int8)
        found[f"{name}_scale"] = scale.bfloat16()
    return found


def write(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict, *, layout: str = "shards", num_shards: int = 3
) -> Path:
    """Write a checkpoint.

    Args:
        directory: The directory; it may exist.
        tensors: Its tensors.
        config: The configuration of the model.
        layout: "file", "shards" (with an index), "shards without an index", or "files" (with names of their own).
        num_shards: Number of the files, unless it is one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if layout == "file":
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    names = [f"model-{k:05}-of-{num_shards:05}.safetensors" for k in range(1, num_shards + 1)]
    if layout == "files":
        names = [f"part_{'abcdefgh'[k]}.safetensors" for k in range(num_shards)]
    for k, file in enumerate(names):
        part = dict([*tensors.items()][k::num_shards])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if layout == "shards":
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of bytes beside a checkpoint."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: k for k, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def digest_of(model: torch.nn.Module) -> str:
    """Return the digest of all weights of a model."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
