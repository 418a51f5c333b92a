"""A decoder with the names and shapes of `files.llama_layout`, in plain torch: what a first forward is taken of."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.files import Layout

_HEAD_DIM = 64
_GROUPS = 4
"""Query heads for each head of keys and values."""


class _Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        narrow = hidden // _GROUPS
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, narrow, bias=False)
        self.v_proj = nn.Linear(hidden, narrow, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            project(x).unflatten(-1, (-1, _HEAD_DIM)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        keys, values = (each.repeat_interleave(_GROUPS, dim=1) for each in (keys, values))
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, 4 * hidden, bias=False)
        self.up_proj = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down_proj = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden)
        self.self_attn = _Attention(hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden)
        self.mlp = _Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Body(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        # Not initialized: on meta that would import torch's compiler, for seconds.
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(vocabulary, hidden), freeze=False)
        self.layers = nn.ModuleList(_Layer(hidden) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Decoder(nn.Module):
    """Tokens of shape (batch, length) to logits of shape (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.model = _Body(vocabulary, hidden, num_layers)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))


def make_decoder(layout: Layout) -> Decoder:
    """Make the model of a layout on `meta`, in BF16."""
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    vocabulary, hidden = shapes["lm_head.weight"]
    num_layers = sum(name.endswith(".input_layernorm.weight") for name in shapes)
    with torch.device("meta"):
        module = Decoder(vocabulary, hidden, num_layers).to(torch.bfloat16)
    if {name: tuple(parameter.shape) for name, parameter in module.named_parameters()} != shapes:
        raise AssertionError("the layout and the decoder have grown apart")
    return module
