"""Tensors that mean something only together: quantized weights, and the scales, zero points and tables beside them.

The format does not say which tensors belong together; the libraries that quantize do, by names. `SUFFIXES` lists the
names of compressed-tensors, FP8 checkpoints of DeepSeek and ComfyUI, NVFP4 and MXFP4, GPTQ, AWQ, MLX, torchao and
bitsandbytes. A name counts only where the tensor that it belongs to is there, in a dtype that quantized weights have:
`logit_scale` beside `logit` in F32 is a tensor like any other. A tensor of F8_E8M0 is a scale under any name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SUFFIXES: dict[str, tuple[str, ...]] = {
    "_scale": ("", "_packed", "_qdata"),
    "_scale_inv": ("",),
    "_scale_2": ("", "_packed"),
    "_global_scale": ("", "_packed"),
    "_zero_point": ("", "_packed", "_qdata"),
    "_shape": ("_packed",),
    "_scales": ("", "_blocks"),
    ".scale": (".weight", ""),
    ".scale_weight": (".weight",),
    ".scale_input": (".weight",),
    ".input_scale": (".weight", ".weight_packed"),
    ".output_scale": (".weight", ".weight_packed"),
    ".SCB": (".weight",),
    ".weight_format": (".weight",),
    ".scales": (".weight", ".qweight"),
    ".biases": (".weight",),
    ".qzeros": (".qweight",),
    ".g_idx": (".qweight",),
    ".absmax": ("",),
    ".quant_map": ("",),
    ".nested_absmax": ("",),
    ".nested_quant_map": ("",),
}
"""End of a companion's name, and what stands in its place in the name of the tensor that it belongs to."""
_QUANT_STATE = ".quant_state."  # of bitsandbytes: W.quant_state.bitsandbytes__nf4
_TAILS = tuple(suffix[1:] for suffix in SUFFIXES)
_INTEGERS = ("I8", "U8", "I32", "U32")
_SCALES_ONLY = "F8_E8M0"


@dataclass(frozen=True, slots=True)
class Companions:
    """Which tensors of a checkpoint or a module belong together."""

    of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the name of a quantized tensor, the names of its companions."""
    scales: frozenset[str] = frozenset()
    """All names that are never cast."""


def is_quantized(dtype: str) -> bool:
    """Return whether quantized weights are stored in this dtype."""
    return dtype in _INTEGERS or (dtype.startswith(("F4", "F6", "F8")) and dtype != _SCALES_ONLY)


def find_companions(dtypes: Mapping[str, str], names: Iterable[str] = ()) -> Companions:
    """Return which tensors belong together.

    Args:
        dtypes: The dtype of each tensor, as in the format, by its name.
        names: Names of further tensors whose dtype is not known, such as those of shards that are not open.
    """
    kinds = set(dtypes.values())
    if not any(map(is_quantized, kinds)):
        return Companions(scales=frozenset(name for name, dtype in dtypes.items() if dtype == _SCALES_ONLY))
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys([*dtypes, *names]):
        if name.endswith(_TAILS) or _QUANT_STATE in name:  # most names end here
            for owner in dict.fromkeys(_owners(name)):
                if owner != name and is_quantized(dtypes.get(owner, "")):
                    found[owner].append(name)
    scales = {name for some in found.values() for name in some}
    scales |= {name for name, dtype in dtypes.items() if dtype == _SCALES_ONLY}
    return Companions({owner: tuple(some) for owner, some in found.items()}, frozenset(scales))


def _owners(name: str) -> Iterable[str]:
    """Return the names of the tensors to which one of this name may belong."""
    stem, mark, _ = name.partition(_QUANT_STATE)
    if mark:
        yield stem
    dotted = f".{name}"  # a name without a prefix is that of the outermost module
    for suffix, ends in SUFFIXES.items():
        if dotted.endswith(suffix):
            for end in ends:
                yield (dotted.removesuffix(suffix) + end)[1:]
