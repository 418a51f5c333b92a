"""Which tensors belong together: by names of the libraries that quantize, beside a tensor of a quantized dtype."""

from __future__ import annotations

import pytest

from stio.loading.companions import find_companions, is_quantized


@pytest.mark.parametrize(
    ("owner", "dtype", "companions"),
    [
        ("l.weight", "F8_E4M3", ["l.weight_scale"]),  # FP8 by tensor or row
        ("l.weight", "F8_E5M2", ["l.weight_scale_inv"]),  # by block, DeepSeek
        ("l.weight", "F8_E4M3", ["l.scale_weight", "l.scale_input"]),  # ComfyUI
        ("l.weight", "F8_E4M3", ["l.weight_scale", "l.input_scale"]),
        ("l.weight", "F8_E4M3", ["l.scale"]),
        ("l.weight", "I8", ["l.SCB", "l.weight_format"]),  # bitsandbytes
        (
            "l.weight",
            "U8",
            [
                *("l.weight.absmax", "l.weight.quant_map", "l.weight.nested_absmax", "l.weight.nested_quant_map"),
                "l.weight.quant_state.bitsandbytes__nf4",
            ],
        ),
        ("l.weight", "U8", ["l.weight_scale", "l.weight_scale_2"]),  # NVFP4
        ("l.weight_packed", "U8", ["l.weight_scale", "l.weight_global_scale"]),  # compressed-tensors
        ("l.weight_packed", "I32", ["l.weight_scale", "l.weight_zero_point", "l.weight_shape"]),
        ("l.gate_up_proj_blocks", "U8", ["l.gate_up_proj_scales"]),  # MXFP4, gpt-oss
        ("l.qweight", "I32", ["l.scales", "l.qzeros", "l.g_idx"]),  # GPTQ, AWQ
        ("l.weight", "U32", ["l.scales", "l.biases"]),  # MLX
        ("l._weight_qdata", "I8", ["l._weight_scale", "l._weight_zero_point"]),  # torchao
        ("weight", "F8_E4M3", ["scale_weight", "weight_scale"]),  # of the outermost module
    ],
)
def test_c401_names_of_libraries(owner: str, dtype: str, companions: list[str]) -> None:
    dtypes = {"other": "BF16", owner: dtype, **dict.fromkeys(companions, "F32")}
    found = find_companions(dtypes)
    assert set(found.of) == {owner}
    assert sorted(found.of[owner]) == sorted(companions)
    assert found.scales == set(companions)
    assert find_companions({owner: dtype}, [*companions, "other"]) == found  # in shards that are not open
    plain = {**dtypes, owner: "BF16"}
    assert not find_companions(plain).of  # a weight in BF16 has no scales


def test_c401_a_tensor_that_is_named_like_a_scale_is_none() -> None:
    dtypes = {"logit_scale": "F32", "logit": "F32", "ids": "I64", "h.scale": "F32", "h.weight": "BF16", "q": "I8"}
    assert find_companions(dtypes) == find_companions({})


def test_c401_e8m0_is_a_scale_under_any_name() -> None:
    assert find_companions({"a": "F8_E8M0", "b": "F32"}).scales == {"a"}
    assert not is_quantized("F8_E8M0")
