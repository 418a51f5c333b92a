"""Writes chains of deltas by the format's functions alone, for tests of what reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from stio.device.tensors import FORMAT_DTYPES, TORCH_DTYPES
from stio.format import ALIASES_KEY, build_header
from stio.format.delta import DELTA_KEY, FORMAT, ID_KEY, ChangedTensor, Delta, names_of
from stio.runtime import WorkerPool
from stio.storage.checkpoint.changes import Changes, Comparison

_PIECE_BYTES = 16 << 20

State = Mapping[str, torch.Tensor]


def id_of(step: int) -> str:
    """Return the id of a step."""
    return hashlib.md5(str(step).encode()).hexdigest()


def write_checkpoint(path: Path, tensors: State, metadata: Mapping[str, str]) -> None:
    """Write a directory with one file."""
    path.mkdir(parents=True)
    described = [(name, FORMAT_DTYPES[one.dtype], _shape(one)) for name, one in tensors.items()]
    header, order = build_header(described, metadata)
    with open(path / "model.safetensors", "wb") as file:
        file.write(header)
        for name in order:
            file.write(_bytes(tensors[name]))


def write_chain(folder: Path, states: Sequence[State], metadata: Mapping[str, str] | None = None) -> list[Path]:
    """Write the first state whole, and each later one as a delta on the one before; return their directories."""
    paths, more = [folder / f"step-{step}" for step in range(len(states))], dict(metadata or {})
    write_checkpoint(paths[0], states[0], {"format": "pt", ID_KEY: id_of(0)} | more)
    more.pop(ALIASES_KEY, None)  # a delta has those of its base
    for step in range(1, len(states)):
        before, base = states[step - 1], paths[step - 1].name
        write_delta(paths[step], before, states[step], base=base, step=step, metadata=more)
    return paths


def write_delta(
    path: Path,
    before: State,
    after: State,
    *,
    base: str,
    step: int,
    depth: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Delta:
    """Write what differs between two states; the base has the id of the step before."""
    stored: dict[str, torch.Tensor] = {}
    changed: list[ChangedTensor] = []
    for name, tensor in after.items():
        fresh, image = bytearray(_bytes(tensor)), bytearray(_bytes(before[name]))
        if fresh == image:
            continue
        old, new = (torch.frombuffer(one, dtype=torch.uint8) for one in (image, fresh))
        found = find_changes(old.data_ptr(), new.data_ptr(), tensor.numel(), tensor.element_size())
        if found is None:
            stored[name] = tensor
            continue
        positions, values = names_of(len(changed))
        code = torch.uint8 if found.code_bytes == 1 else torch.uint16
        stored[positions] = torch.frombuffer(bytearray(found.codes.tobytes()), dtype=code)
        stored[values] = torch.frombuffer(bytearray(found.values.tobytes()), dtype=torch.uint8).view(tensor.dtype)
        changed.append(ChangedTensor(name, FORMAT_DTYPES[tensor.dtype], _shape(tensor), found.count))
    delta = Delta(base, id_of(step - 1), step if depth is None else depth, True, changed)
    own = {"format": FORMAT, ID_KEY: id_of(step), DELTA_KEY: delta.encode().decode()}
    write_checkpoint(path, stored, dict(metadata or {}) | own)
    return delta


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in the format: there two F4 numbers are two elements."""
    shape = tuple(tensor.shape)
    return (*shape[:-1], shape[-1] * 2) if FORMAT_DTYPES[tensor.dtype] == "F4" else shape


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def next_state(state: State, fraction: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a copy of a state with other bits in about this fraction of the elements of each tensor."""
    after = {}
    for name, tensor in state.items():
        if not tensor.numel():
            after[name] = tensor.clone()
            continue
        bits = tensor.reshape(-1).view(torch.uint8).clone().reshape(tensor.numel(), tensor.element_size())
        bits[torch.rand(tensor.numel(), generator=generator) < fraction, 0] ^= 1
        after[name] = bits.reshape(-1).view(tensor.dtype).reshape(tensor.shape)
    return after


def find_changes(image: int, fresh: int, num_elements: int, item_bytes: int) -> Changes | None:
    """Compare an image of a tensor with its new bytes, and bring the image up to date in the same pass.

    Args:
        image: Address of the old bytes, which become the new ones.
        fresh: Address of the new bytes.
        num_elements: Number of elements.
        item_bytes: Bytes of an element: 1, 2, 4, 8 or 16.

    Returns:
        As `Comparison.changes`.
    """
    return find_changes_in([(image, fresh, num_elements)], item_bytes)


def find_changes_in(pieces: Sequence[tuple[int, int, int]], item_bytes: int, *, num_threads: int = 1) -> Changes | None:
    """Compare a tensor whose image lies in several pieces of memory; see `find_changes`.

    Args:
        pieces: In the order of the tensor: address of the image, address of the new bytes, number of elements.
        item_bytes: Bytes of an element: 1, 2, 4, 8 or 16.
        num_threads: Most threads that compare, the calling one among them.
    """
    step = max(sum(length for *_, length in pieces), 1) if num_threads == 1 else _PIECE_BYTES // item_bytes
    parts = [
        (image + start * item_bytes, fresh + start * item_bytes, min(step, length - start))
        for image, fresh, length in pieces
        for start in range(0, length, step)
    ]
    comparison = Comparison(sum(length for *_, length in parts), item_bytes, len(parts))
    left = list(enumerate(parts))
    if num_threads == 1 or len(parts) == 1:
        for k, part in left:
            comparison.compare(k, *part)
        return comparison.changes()
    pool = WorkerPool("compare")

    def work() -> None:
        for k, part in pool.items(left):
            comparison.compare(k, *part)

    pool.run(work, min(num_threads, len(parts)))
    return comparison.changes()


__all__ = [
    "TORCH_DTYPES",
    "State",
    "find_changes",
    "find_changes_in",
    "id_of",
    "next_state",
    "write_chain",
    "write_checkpoint",
    "write_delta",
]
