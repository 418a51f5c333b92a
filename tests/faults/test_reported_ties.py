"""Fault 302: which of several names of one tensor a save writes, and what transformers reads of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from faults.on_ranks import Tied, ties
from safetensors import safe_open
from safetensors.torch import save_file
from support import require_equal
from torch import nn

import stio
from stio import sync
from stio.compat.huggingface_hub import save_torch_model
from stio.compat.safetensors.torch import save_model

hf = pytest.importorskip("transformers")
hf.utils.logging.set_verbosity_error()
hf.utils.logging.disable_progress_bar()

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SEQ = {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
       "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bert(kind: type[Any] = hf.BertForMaskedLM, **config: Any) -> Any:
    return kind(hf.BertConfig(**SMALL, **config))


def llama(**config: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **{"tie_word_embeddings": True, **config}))


def pair() -> Any:
    decoder = bert(hf.BertLMHeadModel, is_decoder=True, add_cross_attention=True)
    return hf.EncoderDecoderModel(encoder=bert(hf.BertModel), decoder=decoder)


def clip() -> Any:
    text = {**SMALL, **TOKENS, "max_position_embeddings": 16}
    vision = {**SMALL, "image_size": 8, "patch_size": 4}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


# By model: what makes one, and the other classes that read its checkpoint, with the start of their own names.
MODELS: dict[str, tuple[Callable[[], Any], dict[Any, tuple[str, ...]]]] = {
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16)),
        {hf.GPT2Model: (), hf.GPT2ForSequenceClassification: ("score",)},
    ),
    "llama": (llama, {hf.LlamaModel: (), hf.LlamaForSequenceClassification: ("score",)}),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
        ),
        {hf.T5Model: (), hf.T5EncoderModel: (), hf.T5ForSequenceClassification: ("classification_head",)},
    ),
    "bart": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ, max_position_embeddings=16)),
        {hf.BartModel: (), hf.BartForSequenceClassification: ("classification_head",)},
    ),
    "bert": (
        bert,
        {hf.BertModel: ("pooler",), hf.BertForSequenceClassification: ("bert.pooler", "classifier")},
    ),
    "gemma": (
        lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=8)),
        {hf.GemmaModel: (), hf.GemmaForSequenceClassification: ("score",)},
    ),
    "mamba": (
        lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)),
        {hf.MambaModel: ()},
    ),
    "whisper": (
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                **SEQ,
                **TOKENS,
                num_mel_bins=8,
                max_source_positions=16,
                max_target_positions=16,
                decoder_start_token_id=1,
            )
        ),
        {hf.WhisperModel: (), hf.WhisperForAudioClassification: ("classifier", "projector")},
    ),
    "clip": (clip, {hf.CLIPTextModel: (), hf.CLIPVisionModel: ()}),
    "encoder-decoder": (pair, {}),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def require_read(model: Any, directory: Path, others: Mapping[Any, tuple[str, ...]]) -> None:
    """Require that the model's own class and other ones find all that is in a checkpoint, bit for bit."""
    weights = model.state_dict()
    for kind, own in {type(model): (), **others}.items():
        found, info = kind.from_pretrained(directory, output_loading_info=True, local_files_only=True)
        assert [name for name in info["missing_keys"] if not name.startswith(own or ("\0",))] == [], kind
        if kind is type(model):
            require_equal(found.state_dict(), weights)
        elif kind not in (hf.CLIPVisionModel, hf.WhisperForAudioClassification):
            table = model.get_input_embeddings() if kind is not hf.CLIPTextModel else model.text_model.embeddings
            expected = next(table.parameters())
            assert torch.equal(next(found.get_input_embeddings().parameters()), expected), kind


def saved_names(directory: Path) -> set[str]:
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@pytest.mark.matrix
@pytest.mark.parametrize("given", ["module", "shards", "state_dict", "clone"])
@pytest.mark.parametrize("name", MODELS)
def test_c302_each_class_of_a_tied_model_reads_it(tmp_path: Path, name: str, given: str) -> None:
    make, others = MODELS[name]
    torch.manual_seed(1)
    model = make()
    tensors = model.state_dict() if given == "state_dict" else model
    options: dict[str, Any] = {"shards": {"max_shard_size": 5000}, "clone": {"shared": "clone"}}.get(given, {})
    result = sync.save(tensors, tmp_path, **options)
    assert (len(result.files) > 1) == (given == "shards")
    model.config.save_pretrained(tmp_path)
    require_read(model, tmp_path, others)


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_c302_what_transformers_saves_is_what_stio_saves(tmp_path: Path, name: str) -> None:
    model = MODELS[name][0]()
    model.save_pretrained(tmp_path / "theirs")
    sync.save(model, tmp_path / "ours")
    assert saved_names(tmp_path / "ours") == saved_names(tmp_path / "theirs")


@pytest.mark.matrix
@pytest.mark.anyio
@pytest.mark.parametrize("name", ["llama", "t5", "encoder-decoder"])
async def test_c302_a_saver_and_loads_of_all_names(tmp_path: Path, name: str) -> None:
    make, others = MODELS[name]
    model, other = make(), make()
    async with stio.Saver() as saver:
        result = await (await saver.save(model, tmp_path))
    model.config.save_pretrained(tmp_path)
    require_read(model, tmp_path, others)
    loaded = await stio.load(tmp_path)
    require_equal(loaded, model.state_dict())
    assert result.aliases
    assert all(loaded[alias] is loaded[target] for alias, target in result.aliases.items())
    report = await stio.load_into(other, tmp_path)
    assert not report.missing
    require_equal(other.state_dict(), model.state_dict())


def test_c302_a_tie_that_only_the_program_made_is_saved_by_each_name(tmp_path: Path) -> None:
    """The config says that nothing is tied, so transformers restores no name from another one."""
    model = llama(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert not sync.save(model, tmp_path).aliases
    model.config.save_pretrained(tmp_path)
    require_read(model, tmp_path, {hf.LlamaModel: ()})
    shared = pair()  # encoder and decoder share their embeddings, which no class declares
    shared.decoder.bert.set_input_embeddings(shared.encoder.get_input_embeddings())
    shared.decoder.tie_weights()
    result = sync.save(shared, tmp_path / "pair")
    assert result.aliases["decoder.cls.predictions.decoder.weight"] in saved_names(tmp_path / "pair")
    shared.config.save_pretrained(tmp_path / "pair")
    require_read(shared, tmp_path / "pair", {})
    require_equal(sync.load(tmp_path / "pair"), shared.state_dict())


def test_c302_a_tie_to_another_tensor_than_the_declared_one(tmp_path: Path) -> None:
    """`lm_head` is declared to be the embedding. Here it is not, so its own values are saved."""
    model = llama()
    model.lm_head.weight = nn.Parameter(torch.randn(64, 16))
    model.register_parameter("another", model.lm_head.weight)
    sync.save(model, tmp_path)
    assert {"another", "lm_head.weight", "model.embed_tokens.weight"} <= saved_names(tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("keys", "saved"),
    [
        (None, {"middle.weight"}),
        (["middle.weight", "zebra.weight"], {"apple.weight"}),
        ([r"(middle|apple)\.weight"], {"zebra.weight"}),
        (("middle", "apple"), {"zebra.weight"}),
        ({"middle.weight", r"ebra\.w"}, {"apple.weight"}),
        (["middle.weight", "apple[(", "zebra"], {"apple.weight"}),
        ([".*"], {"middle.weight"}),
        ({"middle.weight": "apple.weight", "zebra.weight": "apple.weight"}, {"apple.weight"}),
        ({"middle": "zebra", "apple": "zebra"}, {"zebra.weight"}),
        ({r"(middle|zebra)(?=\.)": "apple"}, {"apple.weight"}),
        ({"weight": "apple.weight"}, {"middle.weight", "zebra.weight", "apple.weight"}),
        ({"middle.weight": "elsewhere.weight", "zebra.weight": "apple.weight"}, {"middle.weight", "apple.weight"}),
        ([], {"middle.weight", "zebra.weight", "apple.weight"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_c302_both_forms_of_the_declaration(tmp_path: Path, keys: Any, saved: set[str], wrapped: bool) -> None:
    """A list of patterns, or a mapping to sources. What it does not restore from another name is saved."""
    module = nn.ModuleDict({"inner": Tied(keys)}) if wrapped else Tied(keys)
    sync.save(module, tmp_path)
    assert {name.removeprefix("inner.") for name in saved_names(tmp_path)} == saved
    require_equal(sync.load(tmp_path), module.state_dict())
    other = nn.ModuleDict({"inner": Tied()}) if wrapped else Tied()
    assert not sync.load_into(other, tmp_path).missing
    require_equal(other.state_dict(), module.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_c302_a_compiled_model_and_one_in_data_parallel(tmp_path: Path) -> None:
    model = llama()
    for name, wrapper in (("compiled", torch.compile(model, backend="eager")), ("parallel", nn.DataParallel(model))):
        result = sync.save(wrapper, tmp_path / name)
        ((alias, target),) = result.aliases.items()
        assert (alias.endswith("lm_head.weight"), target.endswith("model.embed_tokens.weight")) == (True, True)


@pytest.mark.parametrize("names", [("z", "a"), ("a", "z")])
def test_c302_tensors_by_name_keep_the_first_name(tmp_path: Path, names: tuple[str, str]) -> None:
    tensor = torch.randn(3)
    assert sync.save(dict.fromkeys(names, tensor), tmp_path).aliases == {names[1]: names[0]}
    state = {"optimizer": {"z": tensor, "a": tensor}}
    sync.save_state(state, tmp_path / "s.safetensors")
    assert list(sync.load_state(tmp_path / "s.safetensors")["optimizer"]) == ["z", "a"]
    assert sync.load_state(tmp_path / "s.safetensors")["optimizer"]["a"].equal(tensor)


def test_c302_a_checkpoint_that_holds_the_other_name_loads(tmp_path: Path) -> None:
    """Earlier versions kept the name that sorts first; loading and saving again keeps the model's."""
    model = llama()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "model.embed_tokens.weight"}
    aliases = json.dumps({"model.embed_tokens.weight": "lm_head.weight"})
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", "stio.aliases": aliases})
    require_equal(sync.load(tmp_path), model.state_dict())
    other = llama()
    assert not sync.load_into(other, tmp_path).missing
    require_equal(other.state_dict(), model.state_dict())
    sync.save(other, tmp_path)
    assert saved_names(tmp_path) == set(model.state_dict()) - {"lm_head.weight"}


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [None, "BF16"])
def test_c302_convert_keeps_the_first_name_of_a_dict_and_the_name_of_a_module(tmp_path: Path, dtype: Any) -> None:
    model = llama()
    torch.save(model.state_dict(), tmp_path / "w.bin")
    for name, source in (("plain", "w.bin"), ("again", "plain")):
        sync.convert(tmp_path / source, tmp_path / name, dtype=dtype)
        assert saved_names(tmp_path / name) == set(model.state_dict()) - {"lm_head.weight"}
        model.config.save_pretrained(tmp_path / name)
        if dtype is None:
            require_read(model, tmp_path / name, {hf.LlamaModel: ()})
    torch.save(Tied(["middle", "zebra"]), tmp_path / "module.pt")
    with pytest.warns(RuntimeWarning, match="unpickling"):
        sync.convert(tmp_path / "module.pt", tmp_path / "module", trust_pickle=True, dtype=dtype)
    assert saved_names(tmp_path / "module") == {"apple.weight"}


@pytest.mark.slow
def test_c302_the_callback_of_the_trainer(tmp_path: Path) -> None:
    model = llama()
    from integrations.trainer_case import make_trainer

    from stio.integrations.transformers import StioCallback

    trainer = make_trainer(tmp_path, [StioCallback()], model, save_steps=10)
    trainer.train()
    require_read(trainer.model, tmp_path / "checkpoint-10", {hf.LlamaModel: ()})


def test_c302_ranks_keep_the_same_name(tmp_path: Path) -> None:
    expected = {"middle.weight": "apple.weight", "zebra.weight": "apple.weight"}
    assert run_ranks(ties, 2, tmp_path, str(tmp_path)) == [expected, expected]
    assert saved_names(tmp_path / "module") == {"apple.weight"}
    assert not (tmp_path / "differ").exists()


def test_c302_the_drop_ins_keep_the_rules_of_their_originals(tmp_path: Path) -> None:
    """The hub keeps the name that sorts first, safetensors too."""
    for name in ("hub", "one"):
        (tmp_path / name).mkdir()
    save_torch_model(Tied(), tmp_path / "hub")
    assert saved_names(tmp_path / "hub") == {"apple.weight"}
    save_model(Tied(), str(tmp_path / "one" / "m.safetensors"))
    assert saved_names(tmp_path / "one") == {"apple.weight"}
