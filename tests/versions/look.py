"""What a reader finds, and what the next save and `stio gc` leave: by public names only, for tests and the generator.

Tensors and nested state become plain text that says every type, order, tie and bit, so that a version that reads
them otherwise is found out.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from commands import run
from support import bits_of

import stio
from stio.compat import huggingface_hub, olmo
from stio.compat.safetensors.torch import save_file

EXAMPLE_GENERATION = 3
"""What the next save in a test writes; archives hold generations 1 and 2."""

MANY: Mapping[str, Any] = {"max_shard_size": 200}
"""Keywords that give three shards."""


def tensors_of(generation: int) -> dict[str, torch.Tensor]:
    """Return six small tensors with one number in every value."""
    return {f"layer.{k}": torch.full((20 + k,), generation, dtype=torch.int32) for k in range(6)}


# Describing.


def describe_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a line for each tensor: dtype, shape, bits, and with which other name it shares its memory."""
    seen: dict[int, str] = {}
    return {name: _tensor(tensors[name], name, seen) for name in sorted(tensors)}


def _tensor(tensor: torch.Tensor, name: str, seen: dict[int, str]) -> str:
    bits = hashlib.sha256(bits_of(tensor)).hexdigest()[:32]
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {bits}"
    if tensor.numel():
        first = seen.setdefault(tensor.data_ptr(), name)
        text += f" is {first}" if first != name else ""
    return text


def describe_state(state: object) -> str:
    """Return the digest of a nested state's description: every type, the order of keys, ties, the bits of floats."""
    text = json.dumps(_described(state, "state", {}), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _described(value: Any, path: str, seen: dict[int, str]) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        items = [
            [_described(key, path, seen), _described(item, f"{path}/{key!r}", seen)] for key, item in value.items()
        ]
        return [kind.__name__, items]
    if kind in (list, tuple, torch.Size):
        return [kind.__name__, [_described(item, f"{path}/{k}", seen) for k, item in enumerate(value)]]
    if isinstance(value, torch.Tensor):
        is_parameter = isinstance(value, torch.nn.Parameter)
        name = ("parameter" if value.requires_grad else "frozen parameter") if is_parameter else "tensor"
        return [name, _tensor(value.detach(), path, seen)]
    if kind is float:
        return ["float", struct.pack(">d", value).hex()]
    if kind is bytes:
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if kind in (torch.dtype, torch.device, bool, int, str, type(None)):
        return [kind.__name__, str(value)]
    raise AssertionError(f"{path} is a {kind}")


# Reading.


def found_by(way: str, path: Path) -> Any:
    """Return what a reader finds, or the name of the error class that it raises.

    Args:
        way: `load`, `load_state`, `convert`, or `olmo` for the reader of that drop-in.
        path: What to read.
    """
    try:
        if way == "load":
            return describe_tensors(stio.sync.load(path))
        if way == "load_state":
            return describe_state(stio.sync.load_state(path))
        if way == "convert":
            with tempfile.TemporaryDirectory() as folder:
                stio.sync.convert(path, Path(folder, "converted"))
                return describe_tensors(stio.sync.load(Path(folder, "converted"), memory="copy"))
        assert way == "olmo", way
        return describe_state(sorted_keys(olmo.safetensors_file_to_state_dict(path)))
    except stio.StioError as error:
        assert str(path.name) in str(error), f"the error names no file: {error}"
        return type(error).__name__


def sorted_keys(state: Any) -> Any:
    """Sort keys: their order is not in a file of OLMo's."""
    if isinstance(state, dict):
        return {key: sorted_keys(state[key]) for key in sorted(state, key=repr)}
    return state


# The next save, and the command that cleans up.


def save_next(way: str, path: Path, keywords: Mapping[str, Any]) -> None:
    """Save the next generation over what stands at a path.

    Args:
        way: `save`, `save_state`, `hub` or `save_file`, the functions of these names of stio and of its drop-ins.
        path: The destination.
        keywords: Of the save.
    """
    tensors = tensors_of(EXAMPLE_GENERATION)
    if way == "save":
        stio.sync.save(tensors, path, **keywords)
    elif way == "save_state":
        stio.sync.save_state({"generation": EXAMPLE_GENERATION, "tensors": tensors}, path, **keywords)
    elif way == "hub":
        huggingface_hub.save_torch_state_dict(tensors, path, **keywords)
    else:
        assert way == "save_file", way
        save_file(tensors, path, **keywords)


def collect(path: Path, root: Path) -> dict[str, list[str]]:
    """Run `stio gc`; return what it says of each directory, by names relative to `root`."""
    found = json.loads(run("gc", path, "--json").stdout)
    return {
        key: sorted(str(Path(one).relative_to(root)) for one in found[key])
        for key in ("finished", "undone", "removed", "kept")
        if found[key]
    }


def listing(root: Path, *, masked: bool = False) -> list[str]:
    """Return the names of all files, and of directories of stio's own, below a directory.

    Args:
        root: The directory.
        masked: Write `*` for what is random in the names of shards and staging directories.
    """
    names = (
        path.relative_to(root).as_posix() + ("/" if path.is_dir() else "")
        for path in root.rglob("*")
        if path.is_file() or path.name.startswith(".stio-")
    )
    return sorted(mask(name) if masked else name for name in names)


def mask(text: str) -> str:
    """Replace the ids of saves in names, or in the text of an index or a manifest."""
    return re.sub(r"(?<=-)[0-9a-f]{10}(?=-\d{5}-of-|/|$)", "*", text)
