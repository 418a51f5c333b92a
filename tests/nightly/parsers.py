"""The parsers of untrusted text, as targets of a fuzzer; seeds that they accept."""

from __future__ import annotations

import contextlib
import io
import json
import math
import ntpath
import pickle
import posixpath
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import fuzz_header

from stio.conversion.safe_pickle import PickleRefused, PlainPickles
from stio.errors import FormatError, IndexFormatError, UnsafePathError
from stio.format.files.index import parse_index
from stio.format.files.manifest import ALGORITHMS, FileState, Manifest
from stio.format.state.tree import encode_tree, parse_tree
from stio.limits import Limits
from stio.saving.plan import build_index

LIMITS = Limits(max_state_nodes=100_000)


class Finding(AssertionError):
    """A parser accepted an input and made something wrong of it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One parser."""

    run: Callable[[bytes], None]
    """Parses an input. Any exception is a finding."""
    seeds: Callable[[], Iterable[bytes]]
    """Returns inputs that the parser accepts."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise Finding(message)


def same(one: Any, other: Any) -> bool:
    """Compare values and types; a NaN equals a NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.keys()), list(other.keys())) and same(list(one.values()), list(other.values()))
    return bool(one == other) or (isinstance(one, set | frozenset) and len(one) == len(other))


# Headers. The reference is the official reader.


def run_header(data: bytes) -> None:
    """The first byte is the size of the data behind the header; its high bits choose a path of the parser."""
    first = data[0] if data else 0
    case = data[1:], first & 63
    header = fuzz_header.stio_header(fuzz_header.file_of(case))
    _, problem = fuzz_header.check(case, header)
    require(problem is None, str(problem))
    if first & 128:
        with fuzz_header.variant(fast=bool(first & 64), window=24):
            other = fuzz_header.stio_header(fuzz_header.file_of(case))
        require(fuzz_header.columns(other) == fuzz_header.columns(header), "another result with small windows")


def header_seeds() -> Iterable[bytes]:
    for text, size in fuzz_header.corpus():
        for path in (0, 128, 192):
            yield bytes([size | path]) + text


# Indexes and manifests.


def run_index(data: bytes) -> None:
    try:
        index = parse_index(data, path="fuzz")
    except (IndexFormatError, UnsafePathError) as error:
        str(error)
        return
    document = json.loads(data, parse_int=lambda digits: float(digits) if digits == "-0" else int(digits))
    require(index.weight_map == document["weight_map"], "another weight_map than Python's json reads")
    require(list(index.weight_map) == list(document["weight_map"]), "another order than Python's json reads")
    require(set(index.shards) == set(index.weight_map.values()), "not the shards of the weight_map")
    require(same(index.metadata, document.get("metadata") or {}), "other metadata than Python's json reads")
    for shard in index.shards:
        require(posixpath.normpath(posixpath.join("/a/b", shard)).startswith("/a/b/"), f"it leads out: {shard!r}")
        require(ntpath.normpath(ntpath.join("C:\\a\\b", shard)).startswith("C:\\a\\b\\"), f"it leads out: {shard!r}")


def index_seeds() -> Iterable[bytes]:
    plain = {f"layer.{k}.weight": f"model-{k % 3 + 1:05d}-of-00003.safetensors" for k in range(6)}
    yield build_index(plain, 1234, {})
    yield json.dumps({"metadata": {"total_size": 1e3, "x": [None, True, {"y": -1}]}, "weight_map": plain}).encode()
    yield json.dumps(
        {"weight_map": {}, "metadata": None, "other": [1, 2.5e300, "\u00e9\ud83d\ude00"]}, indent=1
    ).encode()
    yield b' {"weight_map" : {"\\u0061\\n":"a.safetensors"}, "metadata":{"total_size":18446744073709551615}}\r\n'


def run_manifest(data: bytes) -> None:
    try:
        manifest = Manifest.parse(data, path="fuzz")
    except FormatError as error:
        str(error)
        return
    with contextlib.suppress(ValueError):  # a name that UTF-8 cannot express
        again = Manifest.parse(manifest.encode(), path="fuzz")
        require(again == manifest, "it changes when it is written and read again")


def manifest_seeds() -> Iterable[bytes]:
    for algorithm, digits in ALGORITHMS.items():
        states = [FileState(17 * k, f"{k:0{digits}x}") for k in range(3)]
        files = {"model.safetensors": tuple(states), "b.safetensors": (states[0],)}
        yield Manifest(algorithm, files).encode()
    yield Manifest("sha256", {}).encode()


# State trees.


def _foreign(tag: str, value: Any) -> object:
    """Stand for torch's types."""
    if tag == "size":
        if not all(type(item) is int and 0 <= item < 2**63 for item in value):
            raise ValueError("no size")
        return value
    if value not in ("float32", "int64", "cpu", "cuda:0"):
        raise ValueError("unknown")
    return (tag, value)


def run_tree(data: bytes) -> None:
    try:
        tree = parse_tree(data, path="fuzz", limits=LIMITS, foreign=_foreign)
    except FormatError as error:
        str(error)
        return
    require(tree.num_nodes <= len(data), "more nodes than bytes")
    tree.fill(lambda reference: reference)


def tree_seeds() -> Iterable[bytes]:
    nodes: list[Any] = [
        ("dict", 9), "step", 7, "lr", 1e-3, "betas", ("tuple", 2), 0.9, ("float", "7ff0000000000000"),
        "huge", ("int", "123456789abcdef0123456789"), "raw", ("bytes", "AAEC"), "state", ("list", 3),
        ("tensor", "state/0"), ("parameter", "state/1"), None, 3, ("ordered_dict", 1), ("tuple", 2), 1, True, "x",
        "types", ("list", 3), ("dtype", "float32"), ("device", "cpu"), ("size", 2), 2, 3,
        "counter", ("counter", 1), "a", 2,
    ]  # fmt: skip
    yield encode_tree(nodes)
    yield encode_tree([("list", 0)])
    yield encode_tree([("list", 1)] * 50 + [1])
    yield encode_tree([("dict", 40), *(item for k in range(40) for item in (k, -k))])
    yield b'{"stio.state":2,"nodes":[\n1\n]}'


# Pickles. The reference is Python's own, which may not import anything.


class NoImports(pickle._Unpickler):  # type: ignore[name-defined]  # the one in C accepts frames that instructions cross
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def run_pickle(data: bytes) -> None:
    try:
        found = PlainPickles(20_000).loads(data, max_nodes=20_000)
    except PickleRefused as error:
        str(error)
        return
    try:
        expected = NoImports(io.BytesIO(data)).load()
    except Exception:  # noqa: BLE001 - what Python refuses and stio accepts is plain all the same
        return
    require(same(found, expected), f"{found!r} is not {expected!r}")


def pickle_seeds() -> Iterable[bytes]:
    shared = [1, 2]
    values = [
        None, True, 0, -1, 2**31, 2**63, -(2**70), 1.5, float("nan"), "", "text\u00e9", "x" * 300, b"", b"raw" * 100, (), (1,),
        (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1, [2, [3]]], {}, {"a": 1, 2: "b", (1, 2): None, 1.5: False},
        set(), {1, 2}, frozenset([3, "x"]), [shared, shared], {"param_groups": [{"lr": 0.1, "params": ["a", "b"]}]},
        bytearray(b"ab"), OrderedDict(a=1),
    ]  # fmt: skip
    for protocol in (2, 3, 4, 5):
        for value in values:
            yield pickle.dumps(value, protocol)


TARGETS = {
    "header": Target(run_header, header_seeds),
    "index": Target(run_index, index_seeds),
    "manifest": Target(run_manifest, manifest_seeds),
    "tree": Target(run_tree, tree_seeds),
    "pickle": Target(run_pickle, pickle_seeds),
}
