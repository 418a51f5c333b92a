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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from stio.errors import StioError, printable
from stio.format.delta import FORMAT
from stio.format.files.names import FILE_SUFFIXES, INDEX_SUFFIX, PICKLE_SUFFIXES, FileName, step_of
from stio.schemes import READERS
from stio.text import is_url, without_secrets

_HEAD_BYTES = 512
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

    @property
    def is_torch_save(self) -> bool:
        """Whether torch.save wrote it, in its new or its old format."""
        return self == _TORCH_SAVE

    @property
    def is_safetensors(self) -> bool:
        """Whether it is a safetensors file by its content; its name may hide that."""
        return self == _SAFETENSORS

    @property
    def is_page(self) -> bool:
        """Whether it is a web page: the error or login that a download has stored, or a list of a directory."""
        return self.name == _PAGE

    def refusal(self, path: str) -> str:
        """Return the message about such a file in the place of a checkpoint."""
        other = "and not safetensors" if self.is_torch_save else "which stio does not read"
        return f"this is {self.name}, {other}; {self.advice_at(path)}"

    def advice_at(self, path: str) -> str:
        """Return what to do with a file at a path or a URL."""
        return f"download it, then {self.advice}" if self.is_torch_save and is_url(path) else self.advice


_TORCH_SAVE = FileKind("a file of torch.save", CONVERT)
_SAFETENSORS = FileKind("a safetensors file by its content", "give its own path")
_PAGE = "a web page"
_SOURCE = "take the checkpoint that it was converted from"
_PROGRAM = "load it with the program that wrote it, and give its tensors to stio.save"
_READ = "read its tensors with {}, and give them to stio.save"
_ARRAYS = "read its arrays with {}, and give them to save_file of stio.compat.safetensors.numpy"
_UNPACK = "decompress it first (`{} -dc FILE > DESTINATION`)"
_OFFLOADED = _READ.format("accelerate.utils.OffloadedWeightsLoader")
_JOIN = (
    "torch's dcp_to_torch_save (`python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE.pt`) "
    f"makes a file of torch.save of it, and then {CONVERT}"
)
WHOLE_BY_TORCH = (
    "load them by torch's HuggingFaceStorageReader (torch.distributed.checkpoint), or join them by "
    "consolidate_safetensors_files (torch.distributed.checkpoint._consolidate_hf_safetensors) and check the result"
)
"""What to do about files in which torch's HuggingFaceStorageWriter has saved the parts of ranks."""

_KINDS = [(place, re.compile(mark, re.DOTALL), FileKind(name, step)) for place, mark, name, step in (
    ("zip", r"\Z", "a zip archive without its end", "it is damaged: fetch it again"),
    ("zip", r"(.*\n)?[^/\n]*/\.data/extern_modules\n", "a package of torch.package", _PROGRAM),
    ("zip", r"(.*\n)?[^/\n]*/constants\.pkl\n", "a TorchScript archive", _READ.format("torch.jit.load")),
    ("zip", r"(.*\n)?([^/\n]*/archive_format|serialized_exported_program\.json)\n",
     "an exported program of torch.export", _READ.format("torch.export.load")),
    ("zip", r"(.*\n)?[^/\n]*/data\.pkl\n", _TORCH_SAVE.name, CONVERT),
    ("zip", r"([^\n]*\.npy\n)+\Z", "an archive of numpy arrays", _ARRAYS.format("numpy.load")),
    ("zip", "", "a zip archive",
     "unpack it first (`python -m zipfile -e FILE DIRECTORY`), and give the checkpoint in it"),
    ("start", r"\x80[\x02-\x05].{,20}\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", _TORCH_SAVE.name, CONVERT),
    ("start", r"\x80[\x02-\x05]", "a pickle that torch.save has not written", _PROGRAM),
    ("start", r".{4}TFL3", "a TensorFlow Lite model", _SOURCE),
    ("start", r".{257}ustar", "a tar archive", "unpack it first (`tar -xf FILE`), and give what is in it"),
    ("start", r"GGUF", "a GGUF file",
     "in transformers, from_pretrained(DIRECTORY, gguf_file=NAME) loads it, and save_pretrained() writes safetensors"),
    ("start", r"lmgg|fmgg|tjgg|algg", "a GGML file", _SOURCE),
    ("start", r"\x89HDF\r\n\x1a\n", "an HDF5 file", _ARRAYS.format("h5py")),
    ("start", r"\x93NUMPY.*'descr': '\|O'", "a numpy array of Python objects, which is a pickle", _PROGRAM),
    ("start", r"\x93NUMPY", "a numpy array", _ARRAYS.format("numpy.load")),
    ("start", r"version https://git-lfs", "a pointer of Git LFS",
     "the file itself was not downloaded: `git lfs pull` in its repository does that"),
    ("start", r"\x1f\x8b", "a file compressed by gzip", _UNPACK.format("gzip")),
    ("start", r"BZh", "a file compressed by bzip2", _UNPACK.format("bzip2")),
    ("start", r"\xfd7zXZ\0", "a file compressed by xz", _UNPACK.format("xz")),
    ("start", r"\x28\xb5\x2f\xfd", "a file compressed by zstd", _UNPACK.format("zstd")),
    ("start", r"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    ("start", r"ZN\0[\0-\x20]", "a file compressed by zipnn", "decompress it first, with zipnn"),
    ("start", r"\|TZR\|", "a file of tensorizer", _READ.format("tensorizer.TensorDeserializer")),
    ("start", r"[\x01-\x20]\0\0\0[\x04-\x40]\0[A-Z][A-Za-z0-9]{2,60}\0", "a model of CTranslate2", _SOURCE),
    # The version of the format, then a description (field 2) whose first field is an input or, in a long form, text.
    ("start", r"\x08[\x01-\x20]\x12[\x80-\xff]{,3}[\0-\x7f](\x0a|\xa2\x06)", "a Core ML model", _SOURCE),
    # The version of the format, then text, a graph or the versions of operators (the fields 2, 3, 4, 6, 7 and 8).
    ("start", r"\x08[\x01-\x1f](\x12|\x1a|\x22|\x32|\x3a|\x42)", "an ONNX model", _ARRAYS.format("onnx.numpy_helper")),
    # A map, and the text that is its first key.
    ("start", r"([\x81-\x8f]|\xde..|\xdf.{4})(\xa1[ -~][\x80-\xdf]|[\xa2-\xbf][ -~]{2}|\xd9.[ -~]{2})",
     "a msgpack file, as flax writes them", _ARRAYS.format("flax.serialization.msgpack_restore")),
    ("start", r"(?i:\s*(<!doctype html|<html|<\?xml))", _PAGE,
     "a download has stored an error or a login in the place of the file: fetch it again"),
    ("start", r"\s*[{\[]\s*[\"{\[\d\]}]", "JSON text",
     "give a .safetensors file, a directory, or an index whose name ends in .index.json"),
    ("end", r".*FLASHPK\0\Z", "a file of flashpack", _READ.format("flashpack")),
    ("path", r".*\.dat\Z", "a file without a header, like the .dat of a folder that accelerate offloads to",
     _OFFLOADED),
    ("directory", r"(.*\n)?\.metadata\n.*\.distcp\n", "a checkpoint of torch.distributed.checkpoint", _JOIN),
    ("directory", r"(.*\n)?(_METADATA|manifest\.ocdbt|_CHECKPOINT_METADATA)\n", "a checkpoint of Orbax",
     _ARRAYS.format("orbax.checkpoint")),
    ("directory", r"(.*\n)?(\.zgroup|\.zarray|zarr\.json)\n", "a directory of zarr", _ARRAYS.format("zarr.open_group")),
    ("directory", r"(?=(.*\n)?index\.json\n).*\.dat\n", "a folder that accelerate offloads to", _OFFLOADED),
    ("directory", r"(.*\n)?model_index\.json\n", "the root of a diffusers pipeline",
     "its models are in folders of their own: give the path of one, such as DIRECTORY/unet"),
    ("directory", r"(?=(.*\n)?Data\n)(.*\n)?Manifest\.json\n", "a Core ML package", _SOURCE),
    ("directory", r"(.*\n)?sharded\n", "a directory whose sharded/ may hold parts of ranks", WHOLE_BY_TORCH),
)]  # fmt: skip
"""Each kind: where it shows, an expression for the text there (of names with a newline after each), and its FileKind.

The first row that matches counts. In commands, FILE and DIRECTORY are the source. Tests run them.
"""


def _kind_at(place: str, text: str) -> FileKind | None:
    """Return the kind that a text shows."""
    return next((kind for where, mark, kind in _KINDS if where == place and mark.match(text)), None)


def kind_of(read: Callable[[int, int], bytes], nbytes: int, path: str) -> FileKind | None:
    """Return the kind of a file; None: it is of no known kind.

    Args:
        read: Returns the bytes `[begin, end)` of the file. A `StioError` at its end leaves out what is there.
        nbytes: Size of the file.
        path: Path of the file; it counts for a file without a mark.
    """
    head, tail = read(0, min(_HEAD_BYTES, nbytes)), b""
    header_bytes, text = int.from_bytes(head[:_PREFIX_BYTES], "little"), head[_PREFIX_BYTES:]
    if header_bytes <= nbytes - _PREFIX_BYTES and text.lstrip(b" ")[:1] == b"{":
        return _SAFETENSORS
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
    return _kind_at("zip", "".join(f"{name.decode(errors='backslashreplace')}\n" for name in sorted({*names})))


_ZIPNN = "znn_compressed_vectors"

_SUFFIXES_OF_OTHERS = (
    ".gguf", ".onnx", ".h5", ".keras", ".npz", ".npy", ".pt2", ".tflite", ".msgpack", ".tensors", ".flashpack", ".znn",
    ".mlmodel",
)  # fmt: skip
"""Ends of names of other files of weights."""

# At least two letters: one is a drive of Windows. `pathlib` makes one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)(.*)", re.DOTALL)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_OTHER_SUFFIXES = (*FILE_SUFFIXES, INDEX_SUFFIX, *PICKLE_SUFFIXES)


def advice_for_path(path: str, schemes: Iterable[str] = ()) -> str:
    """Return what to do about a path that begins with `~`, or a URL in which a slash is missing; "" for others.

    Args:
        path: What the caller passed.
        schemes: Schemes of the URLs that it may be.
    """
    if path.startswith("~"):
        return "'~' is not replaced by a home directory here: pass os.path.expanduser(path)"
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
    if advice := advice_for_path(path, () if parent_exists else READERS):
        return f"; {advice}"
    url = None if parent_exists else _URL.fullmatch(path)
    if url is not None and (url[2] or url[3]):
        if url[1].lower() == "file":
            return f"; pass the path of a file of this machine, not a URL: {printable('/' + url[3].lstrip('/'))!r}"
        known = ", ".join(sorted(READERS))
        text = printable(without_secrets(f"{url[1]}://{url[3]}"))
        return f"; it looks like the URL {text}; stio has no scheme {printable(url[1])!r}, but {known}"
    if _HUB_ID.fullmatch(path) and not parent_exists and not path.endswith(_OTHER_SUFFIXES):
        return f"; it looks like an id of the Hugging Face hub: pass {'hf://' + path!r}, which downloads it"
    return ""


def advice_for_names(names: Iterable[FileName], path: str, kind_of: Callable[[str], FileKind | None]) -> str:
    """Return what to do about a directory, or a URL of one, without a checkpoint, by the names in it.

    Args:
        names: The names.
        path: The directory.
        kind_of: Returns the kind of the file of a name, if it is known.
    """
    names = sorted(names)
    if kind := _kind_at("directory", "".join(f"{name}\n" for name in names)):
        return f"; this is {kind.name}: {kind.advice}"
    weights = [name for name in names if name.is_pickle]
    weights += [name for name in names if name.endswith(_SUFFIXES_OF_OTHERS)]
    if weights:
        kind, seems = kind_of(weights[0]), "is"
        if kind is None and weights[0].is_pickle:
            kind, seems = _TORCH_SAVE, "looks like"
        return "" if kind is None else f"; {printable(weights[0])} {seems} {kind.name}: {kind.advice_at(path)}"
    for name in names:
        if name.is_of_training:
            return f"; {printable(name)} holds the state of a training, and no weights"
    steps = [(named.number, name) for name in names if (name.is_step or name.isdecimal()) and (named := step_of(name))]
    if not steps:
        return ""
    newest = max(steps, key=lambda step: step[0])[1]
    return f"; {printable(newest)} may be one: give its path (stio.latest finds the newest)"


def why_packed(metadata: Mapping[str, object]) -> str:
    """Return why bytes of a checkpoint are not those of its tensors, and what to do; empty if they are."""
    if _ZIPNN not in metadata:
        return _why_delta(metadata)
    return (
        f"zipnn has compressed tensors of this file ({_ZIPNN} in its metadata), and their bytes are no weights; call "
        "zipnn.zipnn_safetensors(), read each tensor by get_tensor of safetensors.torch.safe_open, and save them"
    )


def _why_delta(metadata: Mapping[str, object]) -> str:
    """Return why the tensors of a file are no weights, and what to do, if it is one of a delta; else empty."""
    if metadata.get("format") != FORMAT:
        return ""
    return (
        "this is a file of a delta: it holds what changed since another checkpoint, and no weights; `stio convert "
        "DIRECTORY NEW` makes a full checkpoint of the delta's directory, and stio.load loads it"
    )
