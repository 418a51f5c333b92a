"""diffusers over stio: pipelines, models and LoRA weights that are saved and loaded are as over safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

Compare = Callable[..., Any]


def unet(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4,
    ).eval()  # fmt: skip


def vae() -> Any:
    torch.manual_seed(2)
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 16), norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()  # fmt: skip


def text_encoder() -> Any:
    torch.manual_seed(3)
    config = transformers.CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    return transformers.CLIPTextModel(config).eval()


def scheduler() -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def pipeline() -> Any:
    # Without a tokenizer: the prompt is given as embeddings, and nothing is downloaded.
    return diffusers.StableDiffusionPipeline(
        vae=vae(), text_encoder=text_encoder(), tokenizer=None, unet=unet(), scheduler=scheduler(), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def loaded(folder: Path, **options: Any) -> Any:
    return diffusers.StableDiffusionPipeline.from_pretrained(folder, tokenizer=None, safety_checker=None, **options)


def models(pipe: Any) -> list[Any]:
    return [pipe.unet, pipe.vae, pipe.text_encoder]


def image(pipe: Any) -> Any:
    """Return what two steps of inference give, for tokens that the pipeline's text encoder embeds."""
    pipe.set_progress_bar_config(disable=True)
    tokens = torch.arange(16).reshape(1, 16)
    with torch.no_grad():
        embeddings, negative = (pipe.text_encoder(ids)[0] for ids in (tokens, tokens.flip(1)))
        return pipe(
            prompt_embeds=embeddings, negative_prompt_embeds=negative, num_inference_steps=2, output_type="np",
            height=16, width=16, generator=torch.Generator().manual_seed(0),
        ).images  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    pipeline().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("options", [{}, {"variant": "fp16"}, {"max_shard_size": "120KB"}], ids=str)
def test_pipeline_is_saved_and_loaded(compare: Compare, options: dict[str, Any]) -> None:
    def action(folder: Path) -> Any:
        pipeline().save_pretrained(folder, **options)
        pipe = loaded(folder, variant=options.get("variant"))
        return models(pipe), image(pipe)

    compare(action, saves=True)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.bfloat16}, {"low_cpu_mem_usage": False}, {"use_safetensors": True}], ids=str
)
def test_pipeline_is_loaded(compare: Compare, source: Path, options: dict[str, Any]) -> None:
    compare(lambda folder: models(loaded(source, **options)))


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # diffusers opens a file and leaves it
@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}], ids=str)
def test_model_of_a_sharded_checkpoint(compare: Compare, tmp_path: Path, device_map: Any) -> None:
    unet().save_pretrained(tmp_path / "unet", max_shard_size="120KB")
    assert len(list((tmp_path / "unet").glob("*.safetensors"))) > 2

    def action(folder: Path) -> Any:
        first = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "unet")
        second = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "unet", device_map=device_map)
        third = diffusers.AutoModel.from_pretrained(str(tmp_path / "unet"), disable_mmap=True)
        return first, second, third

    compare(action)


def test_model_offloaded_to_disk(compare: Compare, tmp_path: Path) -> None:
    unet().save_pretrained(tmp_path / "unet")

    places = {name: "disk" if name in ("mid_block", "up_blocks") else "cpu" for name, _ in unet().named_children()}

    def action(folder: Path) -> Any:
        module = diffusers.UNet2DConditionModel.from_pretrained(
            tmp_path / "unet", device_map=places, offload_folder=folder
        )
        assert next(module.mid_block.parameters()).is_meta
        with torch.no_grad():
            return module, module(torch.ones(1, 4, 8, 8), 3, torch.ones(1, 4, 32)).sample

    compare(action)


def test_groups_of_layers_offloaded_to_disk(compare: Compare) -> None:
    """diffusers writes each group to a file, and reads it when the group runs."""
    from diffusers.hooks import apply_group_offloading

    def action(folder: Path) -> Any:
        module = unet()
        apply_group_offloading(
            module, torch.device("cpu"), torch.device("cpu"), "leaf_level", offload_to_disk_path=str(folder)
        )
        with torch.no_grad():
            result = module(torch.ones(1, 4, 8, 8), 3, torch.ones(1, 4, 32)).sample
        for path in folder.iterdir():
            path.unlink()  # names of groups contain addresses
        return result

    compare(action, saves=True)


def test_lora_weights(compare: Compare, source: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)

    def action(folder: Path) -> Any:
        pipe = loaded(source)
        torch.manual_seed(4)
        pipe.unet.add_adapter(config, "first")
        weights = peft.get_peft_model_state_dict(pipe.unet, adapter_name="first")
        diffusers.StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=weights, safe_serialization=True)
        again = loaded(source)
        again.load_lora_weights(folder, adapter_name="second")
        pipe.unet.save_lora_adapter(folder / "adapter", adapter_name="first")
        third = unet()
        name = "pytorch_lora_weights.safetensors"
        third.load_lora_adapter(folder / "adapter", prefix=None, weight_name=name)
        result = image(again)
        again.fuse_lora()
        return models(pipe), models(again), third, result, image(again)

    compare(action, saves=True)


def test_textual_inversion(compare: Compare, tmp_path: Path) -> None:
    """An embedding of a file, as diffusers reads it for a new token."""
    from diffusers.loaders.textual_inversion import load_textual_inversion_state_dicts
    from safetensors.torch import save_file

    save_file({"<new>": torch.linspace(0, 1, 32)}, tmp_path / "learned.safetensors")
    compare(lambda folder: load_textual_inversion_state_dicts([str(tmp_path / "learned.safetensors")]))


def test_model_of_a_single_file(compare: Compare, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    unet().save_pretrained(tmp_path / "config")
    weights = load_file(tmp_path / "config" / "diffusion_pytorch_model.safetensors")
    save_file(weights, tmp_path / "single.safetensors")

    def action(folder: Path) -> Any:
        return diffusers.UNet2DConditionModel.from_single_file(
            str(tmp_path / "single.safetensors"), config=str(tmp_path / "config"), local_files_only=True
        )

    compare(action)
