"""The checkpoints that the contestants load and save: made here, without stio, so that its faults cannot help it.

A file is laid out as the official writer does it: tensors in the order of their names, a JSON header padded to
eight bytes, data right behind it. The bytes are pseudo-random and the same for a given layout, so every contestant
gets a file of its own (a live mapping defeats eviction) and all of them must come to one checksum.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ITEM_BYTES = 2
"""BF16 throughout, as language models are published."""

_BLOCK_BYTES = 16 << 20
_SEED = 20240611
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One tensor of a layout."""

    name: str  # its key in the file
    shape: tuple[int, ...]  # its dimensions

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one kind of file."""

    label: str  # names the files of this layout
    tensors: tuple[TensorShape, ...]  # in file order

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest tensor."""
        return max(tensor.nbytes for tensor in self.tensors)


def llama_layout(size_bytes: int) -> Layout:
    """Give the names and shapes of a Llama-like model of at least `size_bytes`.

    The layers are those of a model of one billion parameters (hidden 2048, a quarter of the query heads for keys and
    values); their number follows the size. Below 1 GB hidden is 1024, so that a quick run still has several layers;
    from 8 GB on it is 4096, as models of that size have it; below 100 MB, where nothing is measured, it is 256.
    """
    steps = ((8_000_000_000, 4096), (1_000_000_000, 2048), (100_000_000, 1024), (0, 256))
    hidden = next(hidden for least, hidden in steps if size_bytes >= least)
    narrow, wide, vocabulary = hidden // 4, 4 * hidden, 32000
    layer = {
        "input_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, wide),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.k_proj.weight": (narrow, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.v_proj.weight": (narrow, hidden),
    }
    ends = {"lm_head.weight": (vocabulary, hidden), "model.embed_tokens.weight": (vocabulary, hidden)}
    ends_bytes = sum(math.prod(shape) for shape in ends.values()) * ITEM_BYTES
    layer_bytes = sum(math.prod(shape) for shape in layer.values()) * ITEM_BYTES
    num_layers = max(1, math.ceil((size_bytes - ends_bytes) / layer_bytes))
    shapes: dict[str, tuple[int, ...]] = {**ends, "model.norm.weight": (hidden,)}
    for index in range(num_layers):
        shapes |= {f"model.layers.{index}.{suffix}": shape for suffix, shape in layer.items()}
    return _sorted_layout("llama", shapes)


def many_layout(count: int, tensor_bytes: int) -> Layout:
    """Give `count` tensors of `tensor_bytes` each, named as the experts of a mixture model."""
    parts = ("down_proj", "gate_proj", "up_proj")
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{index // 384}.mlp.experts.{index // 3 % 128}.{parts[index % 3]}.weight": (
            tensor_bytes // ITEM_BYTES,
        )
        for index in range(count)
    }
    return _sorted_layout(f"many-{count}", shapes)


def bert_layout(label: str, hidden: int, num_layers: int, vocabulary: int) -> Layout:
    """Give the names and shapes of an encoder as BERT, for sizes below those of language models."""
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (vocabulary, hidden)}
    blocks = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (4 * hidden, hidden),
        "output.dense": (hidden, 4 * hidden),
    }
    for index in range(num_layers):
        for suffix, (rows, columns) in blocks.items():
            shapes[f"encoder.layer.{index}.{suffix}.weight"] = (rows, columns)
            shapes[f"encoder.layer.{index}.{suffix}.bias"] = (rows,)
    return _sorted_layout(label, shapes)


def sparse_layout(size_bytes: int) -> Layout:
    """Give a layout of equal large matrices that is written as a hole."""
    rows = 8192
    count = math.ceil(size_bytes / (rows * rows * ITEM_BYTES))
    return _sorted_layout("sparse", {f"model.layers.{index}.mlp.weight": (rows, rows) for index in range(count)})


def write_sharded(directory: Path, layout: Layout, max_shard_bytes: int) -> list[Path]:
    """Write `layout` as shards with an index, as models above some GB are published; give the shards' paths."""
    shards: list[list[TensorShape]] = [[]]
    room = max_shard_bytes
    for tensor in layout.tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    paths, weight_map, first_block = [], {}, 0
    for number, tensors in enumerate(shards, 1):
        path = directory / f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard = Layout(layout.label, tuple(tensors))
        write_file(path, shard, first_block=first_block)
        first_block += -(-shard.data_bytes // _BLOCK_BYTES)  # no two shards have the same bytes
        weight_map |= dict.fromkeys((tensor.name for tensor in tensors), path.name)
        paths.append(path)
    index = {"metadata": {"total_size": layout.data_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


def write_file(path: Path, layout: Layout, *, sparse: bool = False, first_block: int = 0) -> int:
    """Write `layout` to `path`, by large buffered writes, synced.

    Args:
        path: Where; an existing file is replaced.
        layout: What.
        sparse: Leave the data a hole.
        first_block: Where in the endless row of pseudo-random blocks its data begins.

    Returns:
        The file's size in bytes.
    """
    header = encode_header(layout)
    size_bytes = len(header) + layout.data_bytes
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        if sparse:
            file.truncate(size_bytes)
        else:
            for block in _random_blocks(layout.data_bytes, first_block):
                _write_all(file.fileno(), block.data)
        os.fsync(file.fileno())
    return size_bytes


def fill_arrays(arrays: Iterable[np.ndarray]) -> None:
    """Fill arrays of bytes, one after the other, with what `write_file` writes."""
    arrays = list(arrays)
    blocks = _random_blocks(sum(len(array) for array in arrays))
    block = np.empty(0, np.uint8)
    for array in arrays:
        filled = 0
        while filled < len(array):
            if not len(block):
                block = next(blocks)
            part = block[: len(array) - filled]
            array[filled : filled + len(part)] = part
            filled, block = filled + len(part), block[len(part) :]


def discard(path: Path) -> None:
    """Remove a file or a directory with all that is in it, and let the filesystem complete its work on that."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        if _libc.syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed", str(path.parent))
    finally:
        os.close(descriptor)


def encode_header(layout: Layout) -> bytes:
    """Encode the length and the JSON of a layout's header, padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in layout.tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """Give where the data of `path` starts, and the span of each tensor relative to that."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return 8 + length, {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}


def _sorted_layout(label: str, shapes: dict[str, tuple[int, ...]]) -> Layout:
    return Layout(label, tuple(TensorShape(name, shapes[name]) for name in sorted(shapes)))


def _random_blocks(total_bytes: int, first_block: int = 0) -> Iterator[np.ndarray]:
    """Yield pseudo-random blocks: one drawn block, with each block's number mixed in (much faster than drawing all)."""
    drawn = np.random.default_rng(_SEED).integers(0, 2**63, _BLOCK_BYTES // 8, dtype=np.uint64)
    for number, start in enumerate(range(0, total_bytes, _BLOCK_BYTES), first_block):
        mixed = drawn ^ np.uint64((number + 1) * 0x9E3779B97F4A7C15 % 2**64)
        yield mixed.view(np.uint8)[: min(_BLOCK_BYTES, total_bytes - start)]


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
