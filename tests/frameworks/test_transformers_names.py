"""Models that transformers 5 writes under other names, and in other shapes, than those of their modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support import require_equal
from torch import nn

import stio
from stio import sync

transformers = pytest.importorskip("transformers", minversion="5")

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}

SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", BASE),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "bert": ("BertForMaskedLM", BASE),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", BASE | {"head_dim": 8}),
    "gpt_oss": ("GptOssForCausalLM", BASE | {"num_local_experts": 4, "head_dim": 8}),
}
"""Kinds whose files have the names of the module."""

OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", {name: BASE[name] for name in BASE if name != "num_key_value_heads"}),
    "vit": ("ViTForImageClassification", IMAGES),
    "dinov2": ("Dinov2Model", IMAGES),
    "mixtral": ("MixtralForCausalLM", BASE | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", BASE | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", BASE | EXPERTS | {"head_dim": 8}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", BASE | ROUTED | LATENT | {"first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", BASE | ROUTED | LATENT | {"first_k_dense_replace": 1}),
    "jamba": ("JambaForCausalLM", BASE | {"num_experts": 4, "use_mamba_kernels": False, "mamba_d_state": 4}),
    "olmoe": ("OlmoeForCausalLM", BASE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeForCausalLM", BASE | {"num_local_experts": 4}),
    "minimax": ("MiniMaxForCausalLM", BASE | {"num_local_experts": 4, "head_dim": 8}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", BASE | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "glm4_moe": ("Glm4MoeForCausalLM", BASE | ROUTED | {"head_dim": 8}),
    "flex_olmo": ("FlexOlmoForCausalLM", BASE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "dots1": ("Dots1ForCausalLM", BASE | ROUTED | {"head_dim": 8, "first_k_dense_replace": 1}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", BASE | {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "granitemoe": ("GraniteMoeForCausalLM", BASE | {"num_local_experts": 4}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", BASE | EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "conv"]}),
    "qwen3_next": ("Qwen3NextForCausalLM", BASE | EXPERTS | HYBRID | {"shared_expert_intermediate_size": 16}),
}
JOINED: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov2 with SwiGLU": ("Dinov2Model", IMAGES | {"use_swiglu_ffn": True}),
    "nomic_bert": ("NomicBertModel", BASE),
}
"""Kinds whose files have several parameters as one tensor."""
KINDS = SAME | OTHER | JOINED
FAST = ["gpt_neox", "mixtral"]
REST = [kind for kind in OTHER if kind not in FAST]


def model(kind: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    name, options = KINDS[kind]
    made = getattr(transformers, name)
    result = made(made.config_class(**options)).eval()
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.normal_()
    return result


def on_meta(kind: str) -> Any:
    """A model whose parameters alone are on meta."""
    result = model(kind)
    empty = {id(one): nn.Parameter(one.to("meta")) for one in result.parameters()}
    for part in result.modules():
        part._parameters.update((leaf, empty[id(one)]) for leaf, one in part._parameters.items() if one is not None)
    return result


def saved(kind: str, folder: Path, **options: Any) -> tuple[Any, Path]:
    """A model, and the directory in which its own library has saved it."""
    written = model(kind)
    written.save_pretrained(folder / "model", **options)
    return written, folder / "model"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "stio"]
    caplog.clear()
    return found


def require_loads_in_place(kind: str, folder: Path) -> None:
    written, path = saved(kind, folder)
    for strict in (True, False):
        module = model(kind, seed=2)
        before = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
        report = sync.load_into(module, path, strict=strict)
        assert (report.missing, report.unexpected) == ((), ())
        require_equal(module.state_dict(), written.state_dict())
        assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == before


def _assign(module: nn.Module, path: Path, **options: Any) -> None:
    sync.load_into(module, path, assign=True, **options)


def _warm_start(module: nn.Module, path: Path, **options: Any) -> None:
    with sync.warm_start(module, path, **options):
        pass


def _pool(module: nn.Module, path: Path, **options: Any) -> None:
    with sync.ModelPool(device="cpu", device_bytes="100MB") as pool:
        pool.add("model", path, make=lambda: module, **options)
        with pool.use("model"):
            pass


Load = Callable[..., None]
LOADS = [_assign, _warm_start, _pool]
WAYS_OUT = r"from_pretrained.*stio\.compat\.install\(\).*save_original_format=False"


def require_refused(kind: str, folder: Path, load: Load) -> None:
    written, path = saved(kind, folder)
    for strict in (True, False):
        with pytest.raises(stio.MismatchError, match=WAYS_OUT) as caught:
            load(on_meta(kind), path, strict=strict)
        assert "strict=False" not in str(caught.value)
        in_place = "; or call load_into without assign=True for a module that is not on 'meta': it converts them"
        assert (in_place in str(caught.value)) == (kind not in JOINED)
    written.save_pretrained(folder / "own", save_original_format=False)  # the second way out
    load(on_meta(kind), folder / "own")


def require_a_save_is_read(kind: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By transformers 5; a warning names the way for others."""
    written = model(kind)
    written.config.save_pretrained(folder)
    warnings_of(caplog)
    sync.save(written, folder, metadata={"format": "pt"})
    sync.save(written, folder, metadata={"format": "pt"})
    expected = 1 if kind not in SAME else 0
    found = [one for one in warnings_of(caplog) if "save_pretrained" in one]
    assert len(found) == expected
    read, report = type(written).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    require_equal(read.state_dict(), written.state_dict())


@pytest.mark.parametrize("kind", FAST)
def test_c417_a_load_in_place(tmp_path: Path, kind: str) -> None:
    require_loads_in_place(kind, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [*REST, *SAME])
def test_c417_a_load_in_place_of_each_kind(tmp_path: Path, kind: str) -> None:
    require_loads_in_place(kind, tmp_path)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kind", ["gpt_neox", "nomic_bert"])
def test_c417_a_load_into_new_memory_names_the_ways_out(tmp_path: Path, kind: str, load: Load) -> None:
    require_refused(kind, tmp_path, load)


@pytest.mark.matrix
@pytest.mark.parametrize("load", [_assign, _warm_start])
@pytest.mark.parametrize("kind", ["mixtral", *REST])
def test_c417_a_load_into_new_memory_of_each_kind(tmp_path: Path, kind: str, load: Load) -> None:
    require_refused(kind, tmp_path, load)


@pytest.mark.parametrize("kind", JOINED)
@pytest.mark.parametrize("strict", [True, False])
def test_c417_files_that_join_parameters(tmp_path: Path, kind: str, strict: bool) -> None:
    _, path = saved(kind, tmp_path)
    with pytest.raises(stio.MismatchError, match=WAYS_OUT):
        sync.load_into(model(kind, seed=2), path, strict=strict)


@pytest.mark.parametrize("kind", FAST)
def test_c417_a_save_warns_once(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    require_a_save_is_read(kind, tmp_path, caplog)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [*REST, *SAME, *JOINED])
def test_c417_a_save_of_each_kind(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    require_a_save_is_read(kind, tmp_path, caplog)


def test_c417_a_module_around_a_model(tmp_path: Path) -> None:
    written, path = saved("mixtral", tmp_path)
    module = nn.ModuleDict({"model": model("mixtral", seed=2)})
    with pytest.raises(stio.MismatchError):  # the names begin with `model.`
        sync.load_into(module, path)
    names = {f"model.{name}": tensor for name, tensor in sync.load(path).items()}
    sync.save(names, tmp_path / "around")
    sync.load_into(module, tmp_path / "around")
    require_equal(module["model"].state_dict(), written.state_dict())


@pytest.mark.parametrize("kind", FAST)
def test_c417_a_model_that_was_read_from_names_of_the_module(tmp_path: Path, kind: str) -> None:
    written, path = saved(kind, tmp_path)
    model(kind, seed=2).save_pretrained(tmp_path / "own", save_original_format=False)
    for strict in (True, False):
        module = type(written).from_pretrained(tmp_path / "own")
        report = sync.load_into(module, path, strict=strict)
        assert (report.missing, report.unexpected) == ((), ())
        require_equal(module.state_dict(), written.state_dict())
        assert module._weight_conversions is not None  # a save keeps to the names that were read
    with pytest.raises(stio.MismatchError, match=WAYS_OUT):
        sync.load_into(module, path, assign=True)


def test_c417_shards_and_another_dtype(tmp_path: Path) -> None:
    written, path = saved("mixtral", tmp_path, max_shard_size="20KB")
    module = model("mixtral", seed=2).double()
    sync.load_into(module, path)
    require_equal(module.state_dict(), written.double().state_dict())


@pytest.mark.parametrize("kind", FAST)
def test_c417_part_of_the_names_with_strict_false(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    written, path = saved(kind, tmp_path)
    tensors = sync.load(path)
    gone = next(name for name in tensors if "norm" in name)
    del tensors[gone]
    sync.save(tensors, tmp_path / "part")
    module = model(kind, seed=2)
    report = sync.load_into(module, tmp_path / "part", strict=False)
    assert report.missing == (gone,)
    assert warnings_of(caplog) == []
    with pytest.raises(stio.MismatchError, match=gone):
        sync.load_into(model(kind, seed=2), tmp_path / "part")
    own = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, written.state_dict()[name])}
    assert own == {gone}


def trainer(kind: str, folder: Path, *, steps: int, seed: int = 1, **options: Any) -> Any:
    from stio.integrations.transformers import StioCallback

    ids = torch.randint(3, 60, (8, 6), generator=torch.Generator().manual_seed(0))
    arguments = transformers.TrainingArguments(
        str(folder / "run"),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    made = transformers.Trainer(
        model(kind, seed), arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[StioCallback()]
    )
    return made, next(one for one in made.callback_handler.callbacks if isinstance(one, StioCallback))


@pytest.mark.costly("three trainings")
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FAST, "qwen3_moe", "jamba", "llama"])
def test_c417_the_callback_writes_the_names_of_save_pretrained(tmp_path: Path, kind: str) -> None:
    first, callback = trainer(kind, tmp_path, steps=2)
    callback.resume(first)
    first.model.save_pretrained(tmp_path / "reference")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    require_equal(
        safetensors.torch.load_file(checkpoint / "model.safetensors"),
        safetensors.torch.load_file(tmp_path / "reference" / "model.safetensors"),
    )
    require_equal(type(first.model).from_pretrained(checkpoint).state_dict(), first.model.state_dict())
    again, callback = trainer(kind, tmp_path, steps=2, seed=2)
    callback.resume(again)  # the training is complete, so this only loads
    require_equal(again.model.state_dict(), first.model.state_dict())
    if kind not in SAME:
        plain, _ = trainer(kind, tmp_path, steps=3, seed=2)
        with pytest.raises(ValueError, match=r"train with StioCallback\.resume\(trainer\)"):
            plain.train(resume_from_checkpoint=True)


@pytest.mark.costly("two trainings")
@pytest.mark.slow
def test_c417_the_best_model_at_the_end(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.1}
    made, callback = trainer("mixtral", tmp_path, steps=4, **options)
    callback.resume(made)
    best = type(made.model).from_pretrained(made.state.best_model_checkpoint)
    require_equal(made.model.state_dict(), best.state_dict())
    plain, _ = trainer("mixtral", tmp_path / "plain", steps=4, **options)
    with pytest.raises(ValueError, match=r"train with StioCallback\.resume\(trainer\)"):
        plain.train()


@pytest.mark.parametrize("kind", JOINED)
def test_c417_the_callback_keeps_names_that_it_can_load_again(tmp_path: Path, kind: str) -> None:
    from stio.integrations.transformers import _weights_of

    written = model(kind)
    assert _weights_of(written) is written


def test_c417_the_callback_writes_all_names_of_shared_layers(tmp_path: Path) -> None:
    from stio.integrations.transformers import _weights_of

    written = model("gpt_neox")
    written.gpt_neox.layers[1] = written.gpt_neox.layers[0]
    written.config.save_pretrained(tmp_path)
    sync.save(_weights_of(written), tmp_path, metadata={"format": "pt"})
    read, report = type(written).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    require_equal(read.state_dict(), written.state_dict())
    again = model("gpt_neox", seed=2)
    again.gpt_neox.layers[1] = again.gpt_neox.layers[0]
    sync.load_into(again, tmp_path)  # a resume
    require_equal(again.state_dict(), written.state_dict())


def test_c417_nothing_is_copied_to_convert_names() -> None:
    from stio.integrations.transformers import _weights_of

    written = model("mixtral")
    memory = {parameter.untyped_storage().data_ptr() for parameter in written.parameters()}
    weights = _weights_of(written)
    assert isinstance(weights, dict)
    assert {tensor.untyped_storage().data_ptr() for tensor in weights.values()} == memory


def test_c417_a_conversion_that_fails_leaves_the_plain_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise AttributeError("reverse_transform")

    written, path = saved("gpt_neox", tmp_path)
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", fail)
    with pytest.raises(stio.MismatchError, match=r"missing lm_head\.weight; unexpected embed_out\.weight"):
        sync.load_into(written, path)
    with caplog.at_level(logging.WARNING):
        sync.save(written, tmp_path / "again")
    assert warnings_of(caplog) == []
