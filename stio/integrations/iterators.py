"""Pairs of name and tensor for loaders that take an iterator, as vLLM's and SGLang's `model.load_weights` do.

    model.load_weights(weights("model/", device="cuda"))

A plain generator over `stio.sync`: between storage and consumer there is the budget and no more, and nothing of it is
left when the generator ends, is closed or dropped.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Unpack

import torch

from stio import sync
from stio.loading.options import Keywords, SourceLike
from stio.loading.plan import Names

__all__ = ["weights"]


def weights(
    source: SourceLike,
    *,
    names: Names | None = None,
    slices: Mapping[str, object] | None = None,
    **keywords: Unpack[Keywords],
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield a checkpoint's tensors as they become ready; blocks, on the thread that iterates.

    Nothing is opened before the first step. Leaving the iterator early, by `close()` or by dropping it, ends the
    reading; tensors that were given out live on.

    Args:
        source: See `stio.load`.
        names: See `stio.load`.
        slices: See `stio.load`.
        **keywords: Those of `stio.open`: `device`, `memory`, `budget_bytes` and the others.

    Returns:
        Names and tensors, on `device`, in the order in which they become ready.

    Raises:
        TypeError: A keyword that `stio.open` does not take; at the call.
        ValueError: A keyword's value is out of range; at the call.
        StioError: Opening or reading failed; at a step.
    """
    return _stream(sync.open(source, **keywords), names, slices)


def _stream(
    checkpoint: sync.Checkpoint, names: Names | None, slices: Mapping[str, object] | None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    with checkpoint, checkpoint.stream(names, slices) as stream:
        yield from stream  # and no loop: its variable would keep a tensor alive while the next one is waited for
