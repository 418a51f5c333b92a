"""Compares what stio relies on in vLLM and SGLang with a release of theirs, by its source; neither is imported.

    python tests/integrations/check_published.py vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl sglang/
    python tests/integrations/check_published.py --download     # the newest releases: 400 MB

It prints what moved, and exits with 1 if anything did. `CONTRACTS` is the record: what the release had that was read.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

Read = Callable[[str], str]
"""Returns the text of a file of the package, by its path."""


@dataclass(frozen=True)
class Fact:
    """One thing that stio relies on."""

    about: str
    path: str
    find: Callable[[ast.Module], Any]
    expected: Any


@dataclass(frozen=True)
class Contract:
    package: str
    version: str
    """The release that was read."""
    facts: tuple[Fact, ...]

    def moved(self, read: Read) -> list[str]:
        """Return what is different in a release."""
        found = []
        for fact in self.facts:
            try:
                value = fact.find(ast.parse(read(fact.path)))
            except (KeyError, LookupError, SyntaxError) as error:
                value = f"not found ({type(error).__name__}: {error})"
            if value != fact.expected:
                found.append(f"{self.package}: {fact.about} ({fact.path}): expected {fact.expected!r}, found {value!r}")
        return found


# What to look for.


def _named(tree: ast.AST, name: str) -> Any:
    """Return the class, function, or value of a name; `A.b` is `b` in the body of `A`."""
    node: Any = tree
    for part in name.split("."):
        found = dict(_items(node))
        if part not in found:
            raise LookupError(f"{getattr(node, 'name', 'the module')} has no {part}")
        node = found[part]
    return node


def _items(node: Any) -> Iterator[tuple[str, Any]]:
    for item in node.body:
        if isinstance(item, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield item.name, item
        elif isinstance(item, ast.Assign):
            yield from ((target.id, item.value) for target in item.targets if isinstance(target, ast.Name))
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, item.value
        elif isinstance(item, ast.If | ast.Try):
            yield from _items(item)


def parameters(name: str) -> Callable[[ast.Module], list[str]]:
    """Find the names of a function's parameters."""

    def find(tree: ast.Module) -> list[str]:
        arguments = _named(tree, name).args
        return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    return find


def abstract_methods(name: str) -> Callable[[ast.Module], list[str]]:
    """Find the methods that a class leaves to its subclasses."""

    def find(tree: ast.Module) -> list[str]:
        methods = [item for item in _named(tree, name).body if isinstance(item, ast.FunctionDef)]
        return sorted(one.name for one in methods if any("abstract" in ast.unparse(d) for d in one.decorator_list))

    return find


def has_fields(name: str, *fields: str) -> Callable[[ast.Module], list[str]]:
    """Find which of these fields a class declares."""

    def find(tree: ast.Module) -> list[str]:
        declared = {
            item.target.id
            for item in _named(tree, name).body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        return [field for field in fields if field in declared]

    return find


def value(name: str) -> Callable[[ast.Module], Any]:
    """Find a constant."""
    return lambda tree: ast.literal_eval(_named(tree, name))


def exports(*names: str) -> Callable[[ast.Module], list[str]]:
    """Find which of these names a module defines, imports or assigns."""

    def find(tree: ast.Module) -> list[str]:
        listed: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                listed.add(node.name)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                listed |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign):
                listed |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return [name for name in names if name in listed]

    return find


def model_attributes(name: str) -> Callable[[ast.Module], list[str]]:
    """Find the attributes of a model that a class reads by `getattr(model, ...)`."""

    def find(tree: ast.Module) -> list[str]:
        calls = (node for node in ast.walk(_named(tree, name)) if isinstance(node, ast.Call))
        return sorted(
            {
                call.args[1].value
                for call in calls
                if isinstance(call.func, ast.Name)
                and call.func.id == "getattr"
                and isinstance(call.args[0], ast.Name)
                and call.args[0].id == "model"
                and isinstance(call.args[1], ast.Constant)
            }
        )

    return find


def asks_for(name: str, attribute: str) -> Callable[[ast.Module], bool]:
    """Find whether a function asks by `hasattr` whether something has an attribute."""

    def find(tree: ast.Module) -> bool:
        calls = (node for node in ast.walk(_named(tree, name)) if isinstance(node, ast.Call))
        return any(
            isinstance(call.func, ast.Name)
            and call.func.id == "hasattr"
            and isinstance(call.args[1], ast.Constant)
            and call.args[1].value == attribute
            for call in calls
        )

    return find


def uses_of(*packages: str) -> Callable[[ast.Module], list[str]]:
    """Find what a module takes from packages by dotted names, such as `safetensors.safe_open`."""

    def find(tree: ast.Module) -> list[str]:
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if text.partition(".")[0] in packages and text.count(".") >= 1:
                    found.add(text)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in packages:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return sorted(one for one in found if not any(other.startswith(f"{one}.") for other in found))

    return find


def calls(name: str) -> Callable[[ast.Module], bool]:
    """Find whether a module calls a function by its plain name."""
    return lambda tree: any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(tree)
    )


_LOADERS = "vllm/model_executor/model_loader"
_TRANSFER = "vllm/distributed/weight_transfer"
_CONFIG_FIELDS = (
    *("load_format", "download_dir", "model_loader_extra_config", "ignore_patterns", "use_tqdm_on_load"),
    "safetensors_load_strategy",
)
_SOURCE_FIELDS = (
    *("model_or_path", "revision", "subfolder", "prefix"),
    *("fall_back_to_pt", "allow_patterns_overrides", "is_unused_weight"),
)

VLLM = Contract(
    "vllm",
    "0.33.0",
    (
        Fact(
            "the group of entry points whose functions are called in each process",
            "vllm/plugins/__init__.py",
            value("DEFAULT_PLUGINS_GROUP"),
            "vllm.general_plugins",
        ),
        Fact("registration", f"{_LOADERS}/__init__.py", parameters("register_model_loader"), ["load_format"]),
        Fact("the choice of a loader", f"{_LOADERS}/__init__.py", parameters("get_model_loader"), ["load_config"]),
        Fact(
            "names of the package",
            f"{_LOADERS}/__init__.py",
            exports("BaseModelLoader", "register_model_loader"),
            ["BaseModelLoader", "register_model_loader"],
        ),
        Fact(
            "methods of a loader",
            f"{_LOADERS}/base_loader.py",
            abstract_methods("BaseModelLoader"),
            ["download_model", "load_weights"],
        ),
        Fact(
            "making a loader",
            f"{_LOADERS}/base_loader.py",
            parameters("BaseModelLoader.__init__"),
            ["self", "load_config"],
        ),
        Fact(
            "a download",
            f"{_LOADERS}/base_loader.py",
            parameters("BaseModelLoader.download_model"),
            ["self", "model_config"],
        ),
        Fact(
            "a load of weights",
            f"{_LOADERS}/base_loader.py",
            parameters("BaseModelLoader.load_weights"),
            ["self", "model", "model_config"],
        ),
        Fact(
            "a load of a model, which calls load_weights",
            f"{_LOADERS}/base_loader.py",
            parameters("BaseModelLoader.load_model"),
            ["self", "vllm_config", "model_config", "prefix"],
        ),
        Fact(
            "fields of the configuration",
            "vllm/config/load.py",
            has_fields("LoadConfig", *_CONFIG_FIELDS),
            list(_CONFIG_FIELDS),
        ),
        Fact(
            "fields of secondary weights",
            f"{_LOADERS}/default_loader.py",
            has_fields("DefaultModelLoader.Source", *_SOURCE_FIELDS),
            list(_SOURCE_FIELDS),
        ),
        Fact(
            "attributes by which models name their files",
            f"{_LOADERS}/default_loader.py",
            model_attributes("DefaultModelLoader.get_all_weights"),
            [
                *("allow_patterns_overrides", "fall_back_to_pt_during_load"),
                *("is_unused_checkpoint_weight", "secondary_weights"),
            ],
        ),
        Fact(
            "the weights for a reload",
            f"{_LOADERS}/default_loader.py",
            parameters("DefaultModelLoader.get_all_weights"),
            ["self", "model_config", "model"],
        ),
        Fact(
            "the filter of experts by rank",
            f"{_LOADERS}/default_loader.py",
            parameters("DefaultModelLoader._init_ep_weight_filter"),
            ["self", "model_config"],
        ),
        Fact(
            "what it leaves out",
            f"{_LOADERS}/ep_weight_filter.py",
            parameters("should_skip_weight"),
            ["weight_name", "local_expert_ids"],
        ),
        Fact(
            "the filter of an engine that only encodes",
            f"{_LOADERS}/default_loader.py",
            parameters("DefaultModelLoader._init_mm_encoder_only_weight_filter"),
            ["self", "model", "model_config"],
        ),
        Fact(
            "where the weights of a model in an object store are",
            "vllm/config/model.py",
            has_fields("ModelConfig", "model_weights"),
            ["model_weights"],
        ),
        Fact(
            "a reload asks for them",
            f"{_LOADERS}/reload/inplace.py",
            asks_for("reload_weights", "get_all_weights"),
            True,
        ),
        Fact(
            "a reload of given tensors",
            f"{_LOADERS}/reload/inplace.py",
            parameters("reload_weights"),
            ["vllm_config", "model", "weights_iterator", "weights_path", "is_checkpoint_format"],
        ),
        Fact(
            "registration of a weight transfer backend",
            f"{_TRANSFER}/factory.py",
            parameters("WeightTransferEngineFactory.register_engine"),
            ["cls", "name", "module_path_or_cls", "class_name"],
        ),
        Fact(
            "making a backend",
            f"{_TRANSFER}/base.py",
            parameters("WeightTransferEngine.__init__"),
            ["self", "config", "vllm_config", "device", "model"],
        ),
        Fact(
            "methods of a backend",
            f"{_TRANSFER}/base.py",
            abstract_methods("WeightTransferEngine"),
            [
                *("finish_weight_update", "init_transfer_engine", "receive_weights", "shutdown"),
                "start_weight_update",
            ],
        ),
        Fact(
            "changed elements of a tensor",
            f"{_LOADERS}/checkpoint_weight_patch.py",
            has_fields("CheckpointWeightPatch", "name", "shape", "dtype", "values", "indices"),
            ["name", "shape", "dtype", "values", "indices"],
        ),
        Fact(
            "writing them",
            f"{_LOADERS}/checkpoint_weight_patch.py",
            parameters("load_checkpoint_weight_patches"),
            ["model", "patches", "max_chunk_bytes", "validate_unique_indices"],
        ),
    ),
)

SGLANG = Contract(
    "sglang",
    "0.5.23",
    (
        Fact(
            "the group of entry points whose functions are called",
            "sglang/srt/plugins/__init__.py",
            value("GENERAL_PLUGINS_GROUP"),
            "sglang.srt.plugins",
        ),
        Fact("they are called by", "sglang/srt/plugins/__init__.py", parameters("load_plugins"), []),
        Fact(
            "the process that loads weights calls them", "sglang/srt/managers/scheduler.py", calls("load_plugins"), True
        ),
        Fact("the variable that names plugins", "sglang/srt/environ.py", exports("SGLANG_PLUGINS"), ["SGLANG_PLUGINS"]),
        Fact(
            "what its loaders take from safetensors",
            "sglang/srt/model_loader/weight_utils.py",
            uses_of("safetensors"),
            ["safetensors.safe_open", "safetensors.torch.load"],
        ),
    ),
)

CONTRACTS = {contract.package: contract for contract in (VLLM, SGLANG)}


def reader_of(place: Path) -> Read:
    """Return how to read the files of a wheel, or of a directory that holds a package or its directory."""
    if place.is_dir():
        return lambda path: (place / path).read_text() if (place / path).exists() else _missing(path)
    archive = ZipFile(place)
    return lambda path: archive.read(path).decode()  # a KeyError if it is not there


def _missing(path: str) -> str:
    raise LookupError(path)


def check(place: Path) -> list[str]:
    """Return what moved in a wheel or directory of one of the packages."""
    read = reader_of(place)
    for contract in CONTRACTS.values():
        try:
            read(contract.facts[0].path)
        except LookupError:
            continue
        return contract.moved(read)
    return [f"{place}: neither {' nor '.join(CONTRACTS)}, or the first file of the record is gone"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", type=Path, help="wheels, or directories of packages")
    parser.add_argument("--download", action="store_true", help="download the newest releases")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        places: list[Path] = arguments.places
        if arguments.download:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
            subprocess.run([*pip, "--only-binary", ":all:", "--dest", directory, *CONTRACTS], check=True)
            places += sorted(Path(directory).iterdir())
        if not places:
            parser.error("no wheel and no directory is given")
        moved = []
        for place in places:
            found = check(place)
            print(f"{place.name}: {f'{len(found)} moved' if found else 'as recorded'}")
            moved += found
    print(*moved, sep="\n")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
