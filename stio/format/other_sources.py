"""Sources that are no safetensors checkpoint on this machine, and what to do with each: for errors that help.

Each function is called after a source could not be opened, and returns a clause to add to the message, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from stio.errors import FormatError, printable
from stio.format.file_kinds import CONVERT, TORCH_SAVE, FileKind
from stio.format.naming import FILE_SUFFIXES, INDEX_SUFFIX, is_index, shard_number, whole_name
from stio.format.step_names import step_named
from stio.runtime.urls import SCHEMES, is_url, without_secrets

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Ends of names of files of `torch.save`."""

_OF_TRAININGS = re.compile(
    r"(training_args|trainer_state|optim|optimizer|lr_scheduler|scheduler|scaler|grad_scaler|sampler|dl_state_dict"
    r"|rng_state|random_states?|custom_checkpoint|.*optim_states)([-_.]?\d+)*\.(pt|pth|bin|ckpt)"
)
"""Names under which trainers store what is no weight: transformers, accelerate, DeepSpeed."""

_MODELS = {
    "pytorch_model.bin": ("model", "pytorch_model"),
    "diffusion_pytorch_model.bin": ("diffusion_pytorch_model",),
}
"""Names of whole models in files of `torch.save`, and the stems of their safetensors."""

_SUFFIXES_OF_OTHERS = (".gguf", ".onnx", ".h5", ".keras", ".npz", ".pt2", ".tflite")
"""Ends of names of other files of weights."""

DCP_METADATA = ".metadata"
"""File of each checkpoint that `torch.distributed.checkpoint` has written, beside data such as `__0_0.distcp`."""

NO_HOME = "'~' is not replaced by a home directory here: pass os.path.expanduser(path)"
"""What to do about a path that begins with `~`."""

_DCP_SUFFIX = ".distcp"

# At least two letters: one is a drive of Windows. `pathlib` makes one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)(.*)", re.DOTALL)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_OTHER_SUFFIXES = (*FILE_SUFFIXES, INDEX_SUFFIX, *PICKLE_SUFFIXES)


def is_pickle_of_weights(name: str) -> bool:
    """Return whether the name of a file in a directory is that of weights in a file of `torch.save`."""
    return name.endswith(PICKLE_SUFFIXES) and not name.startswith(".") and _OF_TRAININGS.fullmatch(name) is None


def pickle_of_another(names: Iterable[str], stem: str) -> str | None:
    """Return the name of a whole model of `torch.save` that is not the model of this checkpoint; of several an index.

    Only names count that transformers and diffusers give to a model: beside its safetensors it is the same model, and
    beside an adapter or an optimizer it is what a reader of the directory may expect.

    Args:
        names: Names of the files of a directory.
        stem: Name of its checkpoint, as `stio.format.directory.NamedCheckpoint.stem`.
    """
    for name in sorted(names, key=lambda name: (not is_index(name), name)):
        shard = shard_number(name)
        whole = whole_name(name) if shard is None else shard.whole
        if whole in _MODELS and stem not in _MODELS[whole]:
            return name
    return None


def refuse_pickle_at_url(source: str) -> None:
    """Raise for a URL that names a file of `torch.save`, or an index of such files.

    Raises:
        FormatError: It names one.
    """
    path = without_secrets(source)
    if is_url(source) and whole_name(path).endswith(PICKLE_SUFFIXES):
        raise FormatError(f"files of torch.save are not read from URLs; download it, then {CONVERT}", path=path)


def advice_for_missing(path: str, *, parent_exists: bool) -> str:
    """Return what to do about a path where nothing is: it may be a URL, an id of the hub, or begin with `~`.

    Args:
        path: What the caller passed.
        parent_exists: Whether there is a directory of the name before its first slash.
    """
    url = None if parent_exists else _URL.fullmatch(path)
    if url is not None:
        scheme, second_slash, rest = url.groups()
        if not second_slash and not rest:
            return ""
        text = printable(without_secrets(f"{scheme}://{rest}"))
        if scheme.lower() in SCHEMES:
            return (
                f"; it looks like the URL {text}, from which a pathlib.Path has removed a slash: pass the URL as text"
            )
        if scheme.lower() == "file":
            return f"; pass the path of a file of this machine, not a URL: {printable('/' + rest.lstrip('/'))!r}"
        cut = "" if second_slash else ", from which a pathlib.Path has removed a slash"
        return f"; it looks like the URL {text}{cut}; stio has no scheme {printable(scheme)!r}"
    if path.startswith("~"):
        return f"; {NO_HOME}"
    if _HUB_ID.fullmatch(path) and not parent_exists and not path.endswith(_OTHER_SUFFIXES):
        return _advice_for_hub_id(path)
    return ""


def _advice_for_hub_id(name: str) -> str:
    return f"; it looks like an id of the Hugging Face hub: pass {'hf://' + name!r}, which downloads it"


def advice_for_names(names: Iterable[str], path: str, kind_of: Callable[[str], FileKind | None]) -> str:
    """Return what to do about a directory, or a URL of one, without a checkpoint, by the names in it.

    Args:
        names: The names.
        path: The directory.
        kind_of: Returns the kind of the file of a name, if it is known.
    """
    names = list(names)
    if DCP_METADATA in names and any(name.endswith(_DCP_SUFFIX) for name in names):
        return (
            "; torch.distributed.checkpoint wrote this one: torch's dcp_to_torch_save (`python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE.pt`) makes a file of torch.save of "
            f"it, and then {CONVERT}; saves with stio.distributed.StioStorageWriter are safetensors from the start"
        )
    found = [name for name in names if is_pickle_of_weights(name)]
    found += [name for name in names if name.endswith(_SUFFIXES_OF_OTHERS)]
    states = [name for name in names if _OF_TRAININGS.fullmatch(name)]
    if states and not found:
        return f"; {printable(states[0])} holds the state of a training, and no weights"
    if not found:
        steps = {step: name for name in names if "." not in name and (step := step_named(name)) is not None}
        if not steps:
            return ""
        return f"; {printable(steps[max(steps)])} may be one: give its path (stio.latest finds the newest)"
    kind = kind_of(found[0])
    if kind is not None:
        return f"; {printable(found[0])} is {kind.name}: {kind.advice_at(path)}"
    is_named_so = is_pickle_of_weights(found[0])
    return f"; {printable(found[0])} looks like {TORCH_SAVE.name}: {TORCH_SAVE.advice_at(path)}" if is_named_so else ""


def advice_for_index(name: str) -> str:
    """Return what to do about an index that cannot be read, by its name."""
    pickled = whole_name(name).endswith(PICKLE_SUFFIXES)
    return f"; it looks like an index of files of torch.save: {CONVERT}" if pickled else ""
