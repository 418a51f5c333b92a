"""What a file is that is not safetensors, by its content, and what to do with it: for errors that help.

Each kind is recognized by its first bytes. A zip archive is a file of torch.save, a TorchScript archive, an archive of
numpy or another one: the names in it decide. Only the first name and those at the end of the archive are read, so a
large or hostile archive costs no more than a small one. A name of a file shows nothing: `model.bin` has many kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stio.errors import StioError, listed
from stio.runtime.urls import is_url

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
_CT2_SPEC = re.compile(rb"[\x01-\x20]\0\0\0[\x04-\x40]\0[A-Z][A-Za-z0-9]{2,60}\0", re.DOTALL)
# The version of the format, then text, a graph or the versions of operators (the fields 2, 3, 4, 6, 7 and 8).
_ONNX = re.compile(rb"\x08[\x01-\x1f](\x12|\x1a|\x22|\x32|\x3a|\x42)")
_WEB_PAGE = re.compile(rb"\s*(<!doctype html|<html|<\?xml)", re.IGNORECASE)
_JSON = re.compile(rb"\s*[{\[]\s*[\"{\[\d\]}]")


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
    "a TorchScript archive",
    "`stio.save(torch.jit.load(FILE).state_dict(), DESTINATION)` saves its tensors",
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

_STARTS: tuple[tuple[tuple[bytes, ...], FileKind], ...] = (
    (
        (b"GGUF",),
        FileKind(
            "a GGUF file",
            "in transformers, from_pretrained(DIRECTORY, gguf_file=NAME) loads it, and save_pretrained() writes "
            "safetensors",
        ),
    ),
    (
        (b"lmgg", b"fmgg", b"tjgg", b"algg"),
        FileKind("a GGML file", "take the checkpoint that it was made from"),
    ),
    (
        (b"\x89HDF\r\n\x1a\n",),
        FileKind("an HDF5 file", "read its arrays with h5py, and give them to stio.save by torch.from_numpy"),
    ),
    (
        (b"\x93NUMPY",),
        FileKind(
            "a numpy array",
            "`stio.save({NAME: torch.from_numpy(numpy.load(FILE))}, DESTINATION)` saves it under a name",
        ),
    ),
    (
        (b"version https://git-lfs",),
        FileKind(
            "a pointer of Git LFS", "the file itself was not downloaded: `git lfs pull` in its repository does that"
        ),
    ),
    ((b"\x1f\x8b",), FileKind("a file compressed by gzip", "decompress it first (gzip -d)")),
    ((b"BZh",), FileKind("a file compressed by bzip2", "decompress it first (bzip2 -d)")),
    ((b"\xfd7zXZ\0",), FileKind("a file compressed by xz", "decompress it first (xz -d)")),
    ((b"\x28\xb5\x2f\xfd",), FileKind("a file compressed by zstd", "decompress it first (zstd -d)")),
    ((b"7z\xbc\xaf\x27\x1c",), FileKind("a 7z archive", "unpack it first")),
)
"""Kinds by the first bytes."""

_MATCHES: tuple[tuple[re.Pattern[bytes], FileKind], ...] = (
    (
        _CT2_SPEC,
        FileKind("a model of CTranslate2", "take the checkpoint that it was converted from"),
    ),
    (
        _ONNX,
        FileKind(
            "an ONNX model",
            "`stio.save({one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy()) for one in "
            "onnx.load(FILE).graph.initializer}, DESTINATION)` saves its tensors",
        ),
    ),
    (
        _WEB_PAGE,
        FileKind("a web page", "a download has stored an error or a login in the place of the file: fetch it again"),
    ),
    (
        _JSON,
        FileKind("JSON text", "give a .safetensors file, a directory, or an index whose name ends in .index.json"),
    ),
)
"""Kinds by an expression that the first bytes match."""

_PICKLE = FileKind(
    "a pickle that torch.save has not written",
    "load it with the program that wrote it, and give its tensors to stio.save",
)
_TFLITE = FileKind("a TensorFlow Lite model", "take the checkpoint that it was converted from")
_TAR = FileKind("a tar archive", "unpack it first (tar -xf), and give the file or directory in it")


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
    if head[4:8] == b"TFL3":
        return _TFLITE
    if head[257:262] == b"ustar":
        return _TAR
    for starts, kind in _STARTS:
        if head.startswith(starts):
            return kind
    return next((kind for expression, kind in _MATCHES if expression.match(head)), None)


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
    return FileKind(
        "a zip archive",
        "unpack it first (python -m zipfile -e FILE DIRECTORY), and give the checkpoint in it; it holds "
        f"{listed(sorted(names))}",
    )


def _advice_for_package(names: Sequence[str]) -> str:
    inner = [name.partition("/")[2] for name in names]
    pickles = [name for name in inner if name.endswith(".pkl") and "/" in name]
    package, _, resource = (pickles[0] if pickles else "PACKAGE/RESOURCE").rpartition("/")
    call = f"load_pickle({package.replace('/', '.')!r}, {resource!r})"
    return (
        f"`torch.package.PackageImporter(FILE).{call}` runs its code and returns its object, whose tensors stio.save "
        "takes"
    )
