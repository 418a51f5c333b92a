"""Nested state, for people: `save_state` and `load_state`, for optimizers, schedulers and what a training loop keeps.

The bytes go the way of any checkpoint (`stio.writer`, `stio.loading`); `stio.nested` takes the state apart and puts it
together. There is no pickle in it: a file cannot make a load run code, and what is of another type is refused.
"""

from __future__ import annotations

from typing import Any, Unpack

from stio.nested import flatten
from stio.restore import start_load_state
from stio.saving import DestinationLike, SaveKeywords, SaveResult
from stio.settings import Keywords, SourceLike
from stio.writer import save

__all__ = ["load_state", "save_state"]


async def save_state(
    state: object, destination: DestinationLike, *, budget_bytes: int | None = None, **keywords: Unpack[SaveKeywords]
) -> SaveResult:
    """Save nested state, atomically and durably: `optimizer.state_dict()`, a scheduler's, a random generator's.

    What it may hold: dict, OrderedDict, Counter (keys: text, integers of 64 bits, floats but NaN, bools, None, tuples
    of those), list, tuple; tensors, parameters (restored as such, with their `requires_grad`), `stio.LazyTensor`;
    text, integers, floats, bools, None, bytes; `torch.Size`, `torch.dtype`, `torch.device`. Of a tensor its numbers are
    saved, as by `stio.save`; of a container its items, not its attributes (`_metadata` of a module's state_dict).

    The same tensor in several places is saved once and restored as one. Tensors that only overlap, and containers that
    stand in several places, are saved each by itself: the tie is lost.

    On disk it is a checkpoint that any safetensors reader opens, `stio.load` too. A tensor's name is its path,
    `state/0/exp_avg`; the tree of everything else stands in the metadata under `stio.state`, or in a U8 tensor
    `/stio.state` where it is long.

    Args:
        state: The state. It must not change meanwhile; a `Saver` returns earlier.
        destination: See `stio.save`.
        budget_bytes: See `stio.save`.
        **keywords: See `SaveKeywords`.

    Raises:
        TypeError: A value or key of another type; the message says where it stands. Nothing was written.
        ValueError: A container that stands in itself, or a NaN as key.
        LimitError: More than `stio.Limits` lets a reader take, or containers nested more than 200 deep.
        StioError: See `stio.save`.
    """
    tensors, keywords = await flatten(state, keywords)
    return await save(tensors, destination, budget_bytes=budget_bytes, **keywords)


async def load_state(source: SourceLike, **keywords: Unpack[Keywords]) -> Any:
    """Load what `save_state` saved.

    Nothing that stands in the file is executed. The tree is checked to its end before any tensor is read.

    Args:
        source: See `stio.load`.
        **keywords: See `Keywords`. `memory` is `"copy"` unless said otherwise: training writes in place, and a mapping
            pays for that page by page. `limits` bounds the tree too.

    Returns:
        The state, with its types, its order and its ties.

    Raises:
        FormatError: The checkpoint holds no nested state (`stio.load` loads its tensors), or a malformed one.
        StioError: See `stio.load`.
    """
    take = await start_load_state(source, keywords).wait()
    return take()
