"""Sources that are no safetensors checkpoint on this machine, and what to do with each: for errors that help.

The functions are called after a source could not be opened. By the content of a file `kind_of` finds what it is; by
names and paths the others find what the caller may mean. These return a clause to add to the message, or nothing.

Each kind of file is recognized by its first bytes. A zip archive is a file of torch.save, a TorchScript archive, an
archive of numpy or another one: the names in it decide. Only the first name and those at the end of the archive are
read, so a large or hostile archive costs no more than a small one. A name of a file shows nothing: `model.bin` has many
kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stio.errors import FormatError, StioError, listed, printable
from stio.format.naming import (
    FILE_SUFFIXES,
    INDEX_SUFFIX,
    is_index,
    is_step_directory,
    shard_number,
    step_named,
    whole_name,
)
from stio.runtime.urls import SCHEMES, is_url, without_secrets

HEAD_BYTES = 512
"""Bytes at the start of a file that decide about its kind."""

_PREFIX_BYTES = 8
"""Bytes at the start of a safetensors file: the length of its header."""

_TAIL_BYTES = 128 << 10
"""Bytes at the end of a zip archive in which names are searched."""

CONVERT = "`stio convert SOURCE DESTINATION` (stio.convert) makes safetensors of it"
"""What to do with a file of torch.save."""

_TORCH_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # the number at the start of the old format, pickled
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_ZIP_ENTRY = re.compile(rb"PK\x01\x02.{24}(..).{16}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that is not safetensors."""

    name: str
    """The kind with its article: `a TorchScript archive`."""
    advice: str
    """What to do with the file: one step."""
    is_torch_save: bool = False
    """Whether torch.save wrote it, in its new or its old format."""

    def refusal(self, path: str) -> str:
        """Return the message about such a file in the place of a checkpoint."""
        other = "and not safetensors" if self.is_torch_save else "which stio does not read"
        return f"this is {self.name}, {other}; {self.advice_at(path)}"

    def advice_at(self, path: str) -> str:
        """Return what to do with a file at a path or a URL."""
        return f"download it, then {self.advice}" if is_url(path) and self.is_torch_save else self.advice


TORCH_SAVE = FileKind("a file of torch.save", CONVERT, is_torch_save=True)

SAFETENSORS = FileKind("a safetensors file by its content", "give its own path")
"""A file whose name hides what it is."""

_TORCH_SCRIPT = FileKind(
    "a TorchScript archive", "`stio.save(torch.jit.load(FILE).state_dict(), DESTINATION)` saves its tensors"
)
_TORCH_EXPORT = FileKind(
    "an exported program of torch.export",
    "`stio.save(dict(torch.export.load(FILE).state_dict), DESTINATION)` saves its tensors",
)
_NPZ = FileKind(
    "an archive of numpy arrays",
    "`stio.save({name: torch.from_numpy(array) for name, array in numpy.load(FILE).items()}, DESTINATION)` saves them",
)
_CUT_ZIP = FileKind("a zip archive without its end", "it is damaged: fetch it again")
_PICKLE = FileKind(
    "a pickle that torch.save has not written",
    "load it with the program that wrote it, and give its tensors to stio.save",
)

_STARTS = [(re.compile(start, re.DOTALL), FileKind(name, advice)) for start, name, advice in (
    (rb".{4}TFL3", "a TensorFlow Lite model", "take the checkpoint that it was converted from"),
    (rb".{257}ustar", "a tar archive", "unpack it first (tar -xf), and give the file or directory in it"),
    (rb"GGUF", "a GGUF file",
     "in transformers, from_pretrained(DIRECTORY, gguf_file=NAME) loads it, and save_pretrained() writes safetensors"),
    (rb"lmgg|fmgg|tjgg|algg", "a GGML file", "take the checkpoint that it was made from"),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file",
     "read its arrays with h5py, and give them to stio.save by torch.from_numpy"),
    (rb"\x93NUMPY", "a numpy array",
     "`stio.save({NAME: torch.from_numpy(numpy.load(FILE))}, DESTINATION)` saves it under a name"),
    (rb"version https://git-lfs", "a pointer of Git LFS",
     "the file itself was not downloaded: `git lfs pull` in its repository does that"),
    (rb"\x1f\x8b", "a file compressed by gzip", "decompress it first (gzip -d)"),
    (rb"BZh", "a file compressed by bzip2", "decompress it first (bzip2 -d)"),
    (rb"\xfd7zXZ\0", "a file compressed by xz", "decompress it first (xz -d)"),
    (rb"\x28\xb5\x2f\xfd", "a file compressed by zstd", "decompress it first (zstd -d)"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (rb"[\x01-\x20]\0\0\0[\x04-\x40]\0[A-Z][A-Za-z0-9]{2,60}\0", "a model of CTranslate2",
     "take the checkpoint that it was converted from"),
    # The version of the format, then text, a graph or the versions of operators (the fields 2, 3, 4, 6, 7 and 8).
    (rb"\x08[\x01-\x1f](\x12|\x1a|\x22|\x32|\x3a|\x42)", "an ONNX model",
     "`stio.save({one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy()) for one in "
     "onnx.load(FILE).graph.initializer}, DESTINATION)` saves its tensors"),
    (rb"(?i:\s*(<!doctype html|<html|<\?xml))", "a web page",
     "a download has stored an error or a login in the place of the file: fetch it again"),
    (rb"\s*[{\[]\s*[\"{\[\d\]}]", "JSON text",
     "give a .safetensors file, a directory, or an index whose name ends in .index.json"),
)]  # fmt: skip
"""Kinds by an expression for the first bytes."""


def kind_of(read: Callable[[int, int], bytes], nbytes: int) -> FileKind | None:
    """Return the kind of a file that is not safetensors; None: it may be safetensors, or is of no known kind.

    Args:
        read: Returns the bytes `[begin, end)` of the file. A `StioError` at its end leaves out the names there.
        nbytes: Size of the file.
    """
    head = read(0, min(HEAD_BYTES, nbytes))
    if starts_like_safetensors(head, nbytes):
        return None
    if head.startswith(b"PK\x03\x04"):
        tail = b""
        with suppress(StioError):
            tail = read(max(0, nbytes - _TAIL_BYTES), nbytes)
        return _kind_of_zip(head, tail)
    if head.startswith(_PICKLES):
        return TORCH_SAVE if _TORCH_MAGIC in head[:32] else _PICKLE
    return next((kind for start, kind in _STARTS if start.match(head)), None)


def starts_like_safetensors(head: bytes, nbytes: int) -> bool:
    """Return whether the first bytes are the length of a header that fits into the file, and its first character."""
    length = int.from_bytes(head[:_PREFIX_BYTES], "little")
    return (
        len(head) > _PREFIX_BYTES and length <= nbytes - _PREFIX_BYTES and head[_PREFIX_BYTES:].lstrip(b" ")[:1] == b"{"
    )


def _kind_of_zip(head: bytes, tail: bytes) -> FileKind:
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    at_the_end = [
        tail[found.end() : found.end() + int.from_bytes(found[1], "little")] for found in _ZIP_ENTRY.finditer(tail)
    ]
    names = [name.decode(errors="backslashreplace") for name in dict.fromkeys((first, *at_the_end))]
    inner = {name.partition("/")[2] for name in names}  # torch puts all files into one directory
    if not at_the_end:
        return _CUT_ZIP
    if ".data/extern_modules" in inner:
        return FileKind("a package of torch.package", _advice_for_package(names))
    if "constants.pkl" in inner:
        return _TORCH_SCRIPT
    if "archive_format" in inner or "serialized_exported_program.json" in names:
        return _TORCH_EXPORT
    if "data.pkl" in inner:
        return TORCH_SAVE
    if all(name.endswith(".npy") for name in names):
        return _NPZ
    advice = "unpack it first (python -m zipfile -e FILE DIRECTORY), and give the checkpoint in it; it holds "
    return FileKind("a zip archive", advice + listed(sorted(names)))


def _advice_for_package(names: Sequence[str]) -> str:
    inner = [name.partition("/")[2] for name in names]
    pickles = [name for name in inner if name.endswith(".pkl") and "/" in name]
    package, _, resource = (pickles[0] if pickles else "PACKAGE/RESOURCE").rpartition("/")
    call = f"load_pickle({package.replace('/', '.')!r}, {resource!r})"
    saved = "whose tensors stio.save takes"
    return f"`torch.package.PackageImporter(FILE).{call}` runs its code and returns its object, {saved}"


PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Ends of names of files of `torch.save`."""

_OF_TRAININGS = re.compile(
    r"(training_args|trainer_state|optim|optimizer|lr_scheduler|scheduler|scaler|grad_scaler|sampler|dl_state_dict"
    r"|rng_state|random_states?|custom_checkpoint|.*optim_states)([-_.]?\d+)*\.(pt|pth|bin|ckpt)"
)
"""Names under which trainers store what is no weight: transformers, accelerate, DeepSpeed."""

_MODELS = {"pytorch_model.bin": ("model", "pytorch_model"), "diffusion_pytorch_model.bin": ("diffusion_pytorch_model",)}
"""Names of whole models in files of `torch.save`, and the stems of their safetensors."""

_SUFFIXES_OF_OTHERS = (".gguf", ".onnx", ".h5", ".keras", ".npz", ".pt2", ".tflite")
"""Ends of names of other files of weights."""

WHOLE_BY_TORCH = (
    "load them by torch's HuggingFaceStorageReader (torch.distributed.checkpoint), or join them by "
    "`consolidate_safetensors_files` (torch.distributed.checkpoint._consolidate_hf_safetensors) and check the result; "
    "the files of stio.distributed.StioStorageWriter hold whole tensors"
)
"""What to do about files in which torch's HuggingFaceStorageWriter has saved the parts of ranks."""

_SHARDED = "sharded"
"""Folder for the parts of the ranks, until the same writer has joined them."""

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


def advice_for_slash(path: str, schemes: Iterable[str]) -> str:
    """Return what to do about the URL of one of some schemes in which a slash is missing; nothing for other paths."""
    url = _URL.fullmatch(path)
    if url is None or url[2] or not url[3] or url[1].lower() not in schemes:
        return ""
    text = printable(without_secrets(f"{url[1]}://{url[3]}"))
    return f"it looks like the URL {text} with a slash missing (a pathlib.Path removes one): pass the URL as text"


def advice_for_missing(path: str, *, parent_exists: bool) -> str:
    """Return what to do about a path where nothing is: it may be a URL, an id of the hub, or begin with `~`.

    Args:
        path: What the caller passed.
        parent_exists: Whether there is a directory of the name before its first slash.
    """
    url = None if parent_exists else _URL.fullmatch(path)
    if not parent_exists and (missing := advice_for_slash(path, SCHEMES)):
        return f"; {missing}"
    if url is not None:
        scheme, second_slash, rest = url.groups()
        if not second_slash and not rest:
            return ""
        text = printable(without_secrets(f"{scheme}://{rest}"))
        if scheme.lower() == "file":
            return f"; pass the path of a file of this machine, not a URL: {printable('/' + rest.lstrip('/'))!r}"
        cut = "" if second_slash else " with a slash missing"
        known = ", ".join(sorted(SCHEMES))
        return f"; it looks like the URL {text}{cut}; stio has no scheme {printable(scheme)!r}, but {known}"
    if path.startswith("~"):
        return f"; {NO_HOME}"
    if _HUB_ID.fullmatch(path) and not parent_exists and not path.endswith(_OTHER_SUFFIXES):
        return f"; it looks like an id of the Hugging Face hub: pass {'hf://' + path!r}, which downloads it"
    return ""


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
    if _SHARDED in names:
        return f"; {_SHARDED}/ may hold parts of ranks, which torch's writer has not joined: {WHOLE_BY_TORCH}"
    found = [name for name in names if is_pickle_of_weights(name)]
    found += [name for name in names if name.endswith(_SUFFIXES_OF_OTHERS)]
    states = [name for name in names if _OF_TRAININGS.fullmatch(name)]
    if states and not found:
        return f"; {printable(states[0])} holds the state of a training, and no weights"
    if not found:
        named = [name for name in names if is_step_directory(name) or name.isdecimal()]
        steps = {step: name for name in named if (step := step_named(name)) is not None}
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
