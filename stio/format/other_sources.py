"""Sources that are no safetensors checkpoint on this machine, and what to do with each: for errors that help.

The functions are called after a source could not be opened. By the content of a file `kind_of` finds what it is; by
names and paths the others find what the caller may mean. These return a clause to add to the message, or nothing.

One table has all kinds of files and directories: where a kind shows (the first bytes of a file, its last ones, the
names in a zip archive or in a directory), an expression for that place, the name of the kind, and the next step. Of an
archive only the first name and those at its end are read, so a large or hostile one costs no more than a small one.
A name of a file shows nothing, `model.bin` has many kinds; only of a file without any mark it is all there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from stio.errors import StioError, listed, printable
from stio.format.naming import (
    FILE_SUFFIXES,
    INDEX_SUFFIX,
    PICKLE_SUFFIXES,
    is_index,
    is_step_directory,
    shard_number,
    step_named,
    whole_name,
)
from stio.runtime.text import SCHEMES, is_url, without_secrets

HEAD_BYTES = 512
"""Bytes at the start of a file that decide about its kind."""

_PREFIX_BYTES = 8
"""Bytes at the start of a safetensors file: the length of its header."""

_TAIL_BYTES = 128 << 10
"""Bytes at the end of a zip archive in which names are searched."""

CONVERT = "`stio convert SOURCE DESTINATION` (stio.convert) makes safetensors of it"
"""What to do with a file of torch.save."""

_ZIP_ENTRY = re.compile(rb"PK\x01\x02.{24}(..).{16}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file or directory that is not safetensors."""

    name: str
    """The kind with its article: `a TorchScript archive`."""
    advice: str
    """What to do with it: one step."""
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

PAGE = "a web page"
"""Name of the kind that is a download's error or login, or a server's list of a directory."""

_SOURCE = "take the checkpoint that it was converted from"
_PROGRAM = "load it with the program that wrote it, and give its tensors to stio.save"
_NUMPY = "`from stio.compat.safetensors.numpy import save_file; save_file("
_OFFLOADED = (
    "`stio.save(dict(accelerate.utils.OffloadedWeightsLoader(save_folder=DIRECTORY)), DESTINATION)` saves the tensors"
)
_NAMED = "jax.tree_util.keystr(path, simple=True, separator='.')"
_KINDS = [(place, re.compile(mark, re.DOTALL), FileKind(*kind)) for place, mark, *kind in (
    ("zip", r"\Z", "a zip archive without its end", "it is damaged: fetch it again"),
    ("zip", r"(.*\n)?[^/\n]*/\.data/extern_modules\n", "a package of torch.package",
     "`torch.package.PackageImporter(FILE).load_pickle(PACKAGE, RESOURCE)` runs its code and returns its object, whose "
     "tensors stio.save takes; it holds {names}"),
    ("zip", r"(.*\n)?[^/\n]*/constants\.pkl\n", "a TorchScript archive",
     "`stio.save(torch.jit.load(FILE).state_dict(), DESTINATION)` saves its tensors"),
    ("zip", r"(.*\n)?([^/\n]*/archive_format|serialized_exported_program\.json)\n",
     "an exported program of torch.export",
     "`stio.save(dict(torch.export.load(FILE).state_dict), DESTINATION)` saves its tensors"),
    ("zip", r"(.*\n)?[^/\n]*/data\.pkl\n", TORCH_SAVE.name, TORCH_SAVE.advice, True),
    ("zip", r"([^\n]*\.npy\n)+\Z", "an archive of numpy arrays",
     _NUMPY + "{name: one.view(ml_dtypes.bfloat16) if one.dtype == 'V2' else one for name, one in "
     "numpy.load(FILE).items()}, DESTINATION)` saves them (V2 is bfloat16, of MLX or ml_dtypes)"),
    ("zip", "", "a zip archive",
     "unpack it first (`python -m zipfile -e FILE DIRECTORY`), and give the checkpoint in it; it holds {names}"),
    ("start", r"\x80[\x02-\x05].{,20}\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", TORCH_SAVE.name, TORCH_SAVE.advice, True),
    ("start", r"\x80[\x02-\x05]", "a pickle that torch.save has not written", _PROGRAM),
    ("start", r".{4}TFL3", "a TensorFlow Lite model", _SOURCE),
    ("start", r".{257}ustar", "a tar archive", "unpack it first (`tar -xf FILE`), and give what is in it"),
    ("start", r"GGUF", "a GGUF file",
     "in transformers, from_pretrained(DIRECTORY, gguf_file=NAME) loads it, and save_pretrained() writes safetensors"),
    ("start", r"lmgg|fmgg|tjgg|algg", "a GGML file", _SOURCE),
    ("start", r"\x89HDF\r\n\x1a\n", "an HDF5 file",
     "read its arrays with h5py, and give them to save_file of stio.compat.safetensors.numpy"),
    ("start", r"\x93NUMPY.*'descr': '\|O'", "a numpy array of Python objects, which is a pickle", _PROGRAM),
    ("start", r"\x93NUMPY", "a numpy array",
     _NUMPY + "{NAME: one.view(ml_dtypes.bfloat16) if one.dtype == 'V2' else one for one in [numpy.load(FILE)]}, "
     "DESTINATION)` saves it under a name (V2 is bfloat16 of ml_dtypes)"),
    ("start", r"version https://git-lfs", "a pointer of Git LFS",
     "the file itself was not downloaded: `git lfs pull` in its repository does that"),
    ("start", r"\x1f\x8b", "a file compressed by gzip", "`gzip -dc FILE > DESTINATION` decompresses it"),
    ("start", r"BZh", "a file compressed by bzip2", "`bzip2 -dc FILE > DESTINATION` decompresses it"),
    ("start", r"\xfd7zXZ\0", "a file compressed by xz", "`xz -dc FILE > DESTINATION` decompresses it"),
    ("start", r"\x28\xb5\x2f\xfd", "a file compressed by zstd", "`zstd -dc FILE > DESTINATION` decompresses it"),
    ("start", r"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    ("start", r"ZN\0[\0-\x20]", "a file compressed by zipnn",
     "`open(DESTINATION, 'wb').write(zipnn.ZipNN().decompress(open(FILE, 'rb').read()))` decompresses it"),
    ("start", r"\|TZR\|", "a file of tensorizer",
     "`stio.save(dict(tensorizer.TensorDeserializer(FILE, device='cpu')), DESTINATION)` saves its tensors"),
    ("start", r"[\x01-\x20]\0\0\0[\x04-\x40]\0[A-Z][A-Za-z0-9]{2,60}\0", "a model of CTranslate2", _SOURCE),
    # The version of the format, then a description (field 2) whose first field is an input or, in a long form, text.
    ("start", r"\x08[\x01-\x20]\x12[\x80-\xff]{,3}[\0-\x7f](\x0a|\xa2\x06)", "a Core ML model", _SOURCE),
    # The version of the format, then text, a graph or the versions of operators (the fields 2, 3, 4, 6, 7 and 8).
    ("start", r"\x08[\x01-\x1f](\x12|\x1a|\x22|\x32|\x3a|\x42)", "an ONNX model",
     _NUMPY + "{one.name: array.astype('f4') if str(array.dtype).endswith(('int2', 'int4', 'e2m1fn')) else array for "
     "one in onnx.load(FILE).graph.initializer for array in [onnx.numpy_helper.to_array(one)]}, DESTINATION)` saves "
     "its tensors, those of 2 and 4 bits as F32"),
    # A map, and the text that is its first key.
    ("start", r"([\x81-\x8f]|\xde..|\xdf.{4})(\xa1[ -~][\x80-\xdf]|[\xa2-\xbf][ -~]{2}|\xd9.[ -~]{2})",
     "a msgpack file, as flax writes them",
     _NUMPY + "{" + _NAMED + ": one for path, one in jax.tree_util.tree_leaves_with_path("
     "flax.serialization.msgpack_restore(open(FILE, 'rb').read()))}, DESTINATION)` saves its arrays"),
    ("start", r"(?i:\s*(<!doctype html|<html|<\?xml))", PAGE,
     "a download has stored an error or a login in the place of the file: fetch it again"),
    ("start", r"\s*[{\[]\s*[\"{\[\d\]}]", "JSON text",
     "give a .safetensors file, a directory, or an index whose name ends in .index.json"),
    ("end", r".*FLASHPK\0\Z", "a file of flashpack",
     "`stio.save(flashpack.deserialization.revert_from_file(FILE), DESTINATION)` saves its tensors"),
    ("path", r".*\.dat\Z", "a file without a header, like the .dat of a folder that accelerate offloads to",
     _OFFLOADED + " of such a folder"),
    ("directory", r"(.*\n)?\.metadata\n.*\.distcp\n", "a checkpoint of torch.distributed.checkpoint",
     "torch's dcp_to_torch_save (`python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE.pt`) "
     f"makes a file of torch.save of it, and then {CONVERT}; saves with stio.distributed.StioStorageWriter are "
     "safetensors from the start"),
    ("directory", r"(.*\n)?(_METADATA|manifest\.ocdbt|_CHECKPOINT_METADATA)\n", "a checkpoint of Orbax",
     _NUMPY + "{" + _NAMED + ": numpy.asarray(one) for path, one in jax.tree_util.tree_leaves_with_path("
     "orbax.checkpoint.StandardCheckpointer().restore(DIRECTORY))}, DESTINATION)` saves its arrays, if DIRECTORY is "
     "the absolute path of the folder with _METADATA"),
    ("directory", r"(.*\n)?(\.zgroup|\.zarray|zarr\.json)\n", "a directory of zarr",
     _NUMPY + "{name: one[...] for name, one in zarr.open_group(DIRECTORY, mode='r').members(max_depth=None) if "
     "isinstance(one, zarr.Array)}, DESTINATION)` saves the arrays of a group"),
    ("directory", r"(?=(.*\n)?index\.json\n).*\.dat\n", "a folder that accelerate offloads to",
     _OFFLOADED + " of it"),
    ("directory", r"(.*\n)?model_index\.json\n", "the root of a diffusers pipeline",
     "its models are in folders of their own: give the path of one ({names})"),
    ("directory", r"(?=(.*\n)?Data\n)(.*\n)?Manifest\.json\n", "a Core ML package", _SOURCE),
)]  # fmt: skip
"""Each kind: where it shows, an expression for the text there (of names with a newline after each), and its FileKind.

The first row that matches counts. In code, FILE and DIRECTORY are the source. Tests run it.
"""


def _kind_at(place: str, text: str, names: Sequence[str] = ()) -> FileKind | None:
    """Return the kind that a text shows; the names go into its advice."""
    kind = next((kind for where, mark, kind in _KINDS if where == place and mark.match(text)), None)
    if kind is None or "{names}" not in kind.advice:
        return kind
    return replace(kind, advice=kind.advice.replace("{names}", listed(names or ["unet"])))


def kind_of(read: Callable[[int, int], bytes], nbytes: int, path: str) -> FileKind | None:
    """Return the kind of a file that is not safetensors; None: it may be safetensors, or is of no known kind.

    Args:
        read: Returns the bytes `[begin, end)` of the file. A `StioError` at its end leaves out what is there.
        nbytes: Size of the file.
        path: Path of the file; it counts for a file without a mark.
    """
    head, tail = read(0, min(HEAD_BYTES, nbytes)), b""
    if starts_like_safetensors(head, nbytes):
        return None
    is_zip = head.startswith(b"PK\x03\x04")
    if not is_zip and (kind := _kind_at("start", head.decode("latin-1"))):
        return kind
    with suppress(StioError):
        tail = read(max(0, nbytes - (_TAIL_BYTES if is_zip else _PREFIX_BYTES)), nbytes)
    if not is_zip:
        return _kind_at("end", tail.decode("latin-1")) or _kind_at("path", path)
    names = [tail[one.end() : one.end() + int.from_bytes(one[1], "little")] for one in _ZIP_ENTRY.finditer(tail)]
    if names:
        names.append(head[30 : 30 + int.from_bytes(head[26:28], "little")])
    shown = sorted({name.decode(errors="backslashreplace") for name in names})
    return _kind_at("zip", "".join(f"{name}\n" for name in shown), shown)


def starts_like_safetensors(head: bytes, nbytes: int) -> bool:
    """Return whether the first bytes are the length of a header that fits into the file, and its first character."""
    length = int.from_bytes(head[:_PREFIX_BYTES], "little")
    return (
        len(head) > _PREFIX_BYTES and length <= nbytes - _PREFIX_BYTES and head[_PREFIX_BYTES:].lstrip(b" ")[:1] == b"{"
    )


_OF_TRAININGS = re.compile(
    r"(training_args|trainer_state|optim|optimizer|lr_scheduler|scheduler|scaler|grad_scaler|sampler|dl_state_dict"
    r"|rng_state|random_states?|custom_checkpoint|.*optim_states)([-_.]?\d+)*\.(pt|pth|bin|ckpt)"
)
"""Names under which trainers store what is no weight: transformers, accelerate, DeepSpeed."""

_MODELS = {"pytorch_model.bin": ("model", "pytorch_model"), "diffusion_pytorch_model.bin": ("diffusion_pytorch_model",)}
"""Names of whole models in files of `torch.save`, and the stems of their safetensors."""

_SUFFIXES_OF_OTHERS = (
    ".gguf", ".onnx", ".h5", ".keras", ".npz", ".npy", ".pt2", ".tflite", ".msgpack", ".tensors", ".flashpack", ".znn",
    ".mlmodel",
)  # fmt: skip
"""Ends of names of other files of weights."""

WHOLE_BY_TORCH = (
    "load them by torch's HuggingFaceStorageReader (torch.distributed.checkpoint), or join them by "
    "`consolidate_safetensors_files` (torch.distributed.checkpoint._consolidate_hf_safetensors) and check the result; "
    "the files of stio.distributed.StioStorageWriter hold whole tensors"
)
"""What to do about files in which torch's HuggingFaceStorageWriter has saved the parts of ranks."""

_SHARDED = "sharded"
"""Folder for the parts of the ranks, until the same writer has joined them."""

NO_HOME = "'~' is not replaced by a home directory here: pass os.path.expanduser(path)"
"""What to do about a path that begins with `~`."""

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


_NO_MODEL = re.compile(r".*\.|scheduler|tokenizer|feature_extractor|image_processor", re.DOTALL)
"""Names of files, and of folders of a pipeline that hold no model."""


def advice_for_names(
    names: Iterable[str], path: str, kind_of: Callable[[str], FileKind | None], is_folder: Callable[[str], bool]
) -> str:
    """Return what to do about a directory, or a URL of one, without a checkpoint, by the names in it.

    Args:
        names: The names.
        path: The directory.
        kind_of: Returns the kind of the file of a name, if it is known.
        is_folder: Returns whether a name without a dot is that of a folder.
    """
    names = sorted(names)
    folders = [name for name in names if not _NO_MODEL.match(name) and is_folder(name)]
    if kind := _kind_at("directory", "".join(f"{name}\n" for name in names), folders):
        return f"; this is {kind.name}: {kind.advice}"
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
