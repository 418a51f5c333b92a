"""Pairs of name and tensor for loaders that take an iterator, as vLLM's and SGLang's `model.load_weights` do.

    model.load_weights(weights("model/", device="cuda"))

A generator over `stio.sync`. At most `budget_bytes` are read ahead of the consumer, and all of it is released when the
generator ends, is closed, or is deleted.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch

from stio import sync
from stio.loading import Names
from stio.storage.checkpoint import SourceLike

__all__ = ["weights"]


def weights(
    source: SourceLike,
    *,
    names: Names | None = None,
    slices: Mapping[str, object] | None = None,
    **keywords: Any,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the tensors of a checkpoint as they become ready; blocks the thread that iterates.

    Nothing is opened before the first step. The load ends when the iterator is closed or deleted. Tensors that it has
    yielded stay valid.

    Args:
        source: See `stio.load`.
        names: See `stio.load`.
        slices: See `stio.load`.
        **keywords: Those of `stio.open`: `device`, `memory`, `budget_bytes` and the others.

    Returns:
        Names and tensors, on `device`, in the order in which they become ready.

    Raises:
        TypeError: `stio.open` does not have a keyword; raised at the call.
        ValueError: The value of a keyword is out of range; raised at the call.
        StioError: Opening or reading failed; raised at a step.
    """
    return _stream(sync.open(source, **keywords), names, slices)


def _stream(
    checkpoint: sync.Checkpoint, names: Names | None, slices: Mapping[str, object] | None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    with checkpoint, checkpoint.stream(names, slices) as stream:
        yield from stream  # no loop here: its variable would hold a tensor during the wait for the next one
