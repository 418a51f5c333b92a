"""Sources that are no safetensors checkpoint on this machine, and what to do with each: for errors that help.

Each function is called after a source could not be opened, and returns a clause to add to the message, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from stio.errors import FormatError, printable
from stio.format.naming import FILE_SUFFIXES, INDEX_SUFFIX, is_hidden, whole_name
from stio.runtime.urls import SCHEMES, is_url, without_secrets

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Ends of names of files of `torch.save`."""

PICKLE_START_BYTES = 4
"""Bytes that `is_pickle_start` needs."""

DCP_METADATA = ".metadata"
"""File of each checkpoint that `torch.distributed.checkpoint` has written, beside data such as `__0_0.distcp`."""

NO_HOME = "'~' is not replaced by a home directory here: pass os.path.expanduser(path)"
"""What to do about a path that begins with `~`."""

_DCP_SUFFIX = ".distcp"
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_CONVERT = "`stio convert SOURCE DESTINATION` (stio.convert) makes safetensors of it"

# At least two letters: one is a drive of Windows. `pathlib` makes one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)(.*)", re.DOTALL)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_OTHER_SUFFIXES = (*FILE_SUFFIXES, INDEX_SUFFIX, *PICKLE_SUFFIXES)


def is_zip_start(head: bytes) -> bool:
    """Return whether a file starts like one of `torch.save` in its new format."""
    return head.startswith(_ZIP_MAGIC)


def is_pickle_start(head: bytes) -> bool:
    """Return whether a file starts like one of `torch.save`, in its new or its old format."""
    return is_zip_start(head) or head.startswith(_PICKLE_PROTOCOLS)


def refuse_pickle_at_url(source: str) -> None:
    """Raise for a URL that names a file of `torch.save`, or an index of such files.

    Raises:
        FormatError: It names one.
    """
    path = without_secrets(source)
    if is_url(source) and whole_name(path).endswith(PICKLE_SUFFIXES):
        raise FormatError(f"files of torch.save are not read from URLs; download it, then {_CONVERT}", path=path)


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
        cut = "" if second_slash else ", from which a pathlib.Path has removed a slash"
        return f"; it looks like the URL {text}{cut}; stio has no scheme {printable(scheme)!r}"
    if path.startswith("~"):
        return f"; {NO_HOME}"
    if _HUB_ID.fullmatch(path) and not parent_exists and not path.endswith(_OTHER_SUFFIXES):
        return _advice_for_hub_id(path)
    return ""


def _advice_for_hub_id(name: str) -> str:
    return f"; it looks like an id of the Hugging Face hub: pass {'hf://' + name!r}, which downloads it"


def advice_for_start(head: bytes) -> str:
    """Return what to do about a file that is not in the format, by its first bytes."""
    return f"; it starts like a file of torch.save: {_CONVERT}" if is_pickle_start(head) else ""


def advice_for_names(names: Iterable[str], path: str) -> str:
    """Return what to do about a directory, or a URL of one, without a checkpoint, by the names in it."""
    names = list(names)
    if DCP_METADATA in names and any(name.endswith(_DCP_SUFFIX) for name in names):
        return (
            "; torch.distributed.checkpoint wrote this one: torch's dcp_to_torch_save (`python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE.pt`) makes a file of torch.save of "
            f"it, and then {_CONVERT}; saves with stio.distributed.StioStorageWriter are safetensors from the start"
        )
    found = [name for name in names if name.endswith(PICKLE_SUFFIXES) and not is_hidden(name)]
    advice = f"download it, then {_CONVERT}" if is_url(path) else _CONVERT
    return f"; {printable(found[0])} looks like a file of torch.save: {advice}" if found else ""


def advice_for_index(name: str) -> str:
    """Return what to do about an index that cannot be read, by its name."""
    pickled = whole_name(name).endswith(PICKLE_SUFFIXES)
    return f"; it looks like an index of files of torch.save: {_CONVERT}" if pickled else ""
