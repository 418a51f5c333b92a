"""An opened checkpoint: every file open, every header parsed and checked, nothing read yet.

Opening decides what a source is (a file, a directory with an index or with one file, an index), opens all
shards through one directory before the first read, and holds index and headers against each other.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FormatError,
    LimitError,
    StorageError,
    TensorNotFoundError,
)
from stio.format.gil_slices import ROWS
from stio.format.header import PREFIX_BYTES, Header, TensorInfo, header_nbytes, parse_header
from stio.format.index import ShardIndex, check_against_shards, parse_index
from stio.format.manifest import MAX_MANIFEST_BYTES
from stio.format.naming import MANIFEST_SUFFIX
from stio.format.shared import ALIASES_KEY
from stio.runtime.limits import Limits
from stio.runtime.memory import allocate
from stio.runtime.operation import start_thread
from stio.storage.adapters import blocking, open_directory, open_file
from stio.storage.base import AsyncRoot, Root, Source

__all__ = ["INDEX_NAME", "ManifestText", "OpenCheckpoint", "OpenOptions", "open_checkpoint"]

logger = logging.getLogger("stio")

INDEX_NAME = "model.safetensors.index.json"
"""The index that a directory is looked through for first."""


_SUFFIX = ".safetensors"
_STAGING = ".stio-"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_INDEX_SUFFIX = ".index.json"
_FIRST_READ_BYTES = 128 << 10
"""Holds the headers of about 1,000 tensors: one read less. More would cost more than that: fresh memory is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """How strict to be when opening."""

    limits: Limits = Limits()
    """Bounds on what a file may ask for."""
    strict: bool = True
    """Tensors that the index does not name are an error, else a warning."""
    follow_symlinks: bool = False
    """Let shards be links out of the checkpoint's root."""
    with_manifest: bool = False
    """Read the manifest beside the checkpoint too (`stio.format.manifest` parses it)."""


@dataclass(frozen=True, slots=True)
class ManifestText:
    """The manifest beside a checkpoint, not parsed yet."""

    path: str
    """Where it stands, or would stand."""
    texts: tuple[bytes, ...]
    """What stood in it before the files were opened, and after that if it was something else; empty: there is none."""
    names: tuple[str, ...]
    """What each of the checkpoint's files is called in it."""


@dataclass(slots=True)
class OpenCheckpoint:
    """Open files and checked headers of one checkpoint."""

    path: str
    """What the caller gave."""
    files: list[Source]
    """One for each shard."""
    headers: list[Header]
    """Likewise."""
    metadata: Mapping[str, Any]
    """Text metadata of the shards, and of the index above it."""
    aliases: Mapping[str, str]
    """Names that are another tensor's, to that tensor's name."""
    manifest: ManifestText | None = None
    """What stands beside it, if the options asked for that."""

    def header_of(self, name: str) -> Header:
        """Return the header that holds a tensor.

        Raises:
            TensorNotFoundError: There is none.
        """
        for header in self.headers:
            if name in header:
                return header
        raise TensorNotFoundError("the checkpoint has no such tensor", path=self.path, found=name)

    def info(self, name: str) -> TensorInfo:
        """Return what the header says of a tensor; of an alias, what it says of its target."""
        target = self.aliases.get(name, name)
        return self.header_of(target).info(target)

    def close(self) -> None:
        """Give all descriptors back. Idempotent."""
        files, self.files = self.files, []
        for file in files:
            file.close()

    def discard(self) -> None:
        """Close, and free the headers where no event loop waits for it; nothing of it may be used afterwards."""
        self.close()
        headers, self.headers = self.headers, []
        if sum(map(len, headers)) > ROWS:
            with suppress(RuntimeError):  # no more threads: then here, by whoever held them last
                start_thread(partial(_clear, headers), name="discard")


def _clear(headers: list[Header]) -> None:
    for header in headers:
        header.clear()


def open_checkpoint(
    source: str | os.PathLike[str] | Root | AsyncRoot, options: OpenOptions, *, check: Callable[[], None] = lambda: None
) -> OpenCheckpoint:
    """Open a checkpoint; blocks.

    Args:
        source: A `.safetensors` file, an index, a directory, or a `Root`.
        options: How strict to be.
        check: Called between files; may raise to end the opening.

    Raises:
        CheckpointNotFoundError: There is nothing at this path, or nothing that can be loaded.
        AmbiguousCheckpointError: A directory with several candidates and no index.
        FormatError: A header is wrong.
        IndexFormatError: The index is wrong, or does not fit the shards.
        UnsafePathError: The index leads out of the directory.
        StorageError: The operating system refused.
    """
    if isinstance(source, Root | AsyncRoot):
        return _open_root(blocking(source), None, options, check)
    path = os.fsdecode(source)
    if path.endswith(_INDEX_SUFFIX):
        with open_directory(os.path.dirname(path) or ".", follow_symlinks=options.follow_symlinks) as root:
            return _open_root(root, os.path.basename(path), options, check)
    if not path.endswith(_SUFFIX) and os.path.isdir(path):
        with open_directory(path, follow_symlinks=options.follow_symlinks) as root:
            return _open_root(root, None, options, check)
    try:
        return _open_single(path, options, check)
    except StorageError:
        if not os.path.isdir(path):
            raise
    with open_directory(path, follow_symlinks=options.follow_symlinks) as root:  # a directory that is named like a file
        return _open_root(root, None, options, check)


def _open_single(path: str, options: OpenOptions, check: Callable[[], None]) -> OpenCheckpoint:
    """Open one file that the caller named."""

    def open_all() -> OpenCheckpoint:
        return _open_shards(path, {os.path.basename(path): lambda: open_file(path)}, None, options, check)

    if not options.with_manifest:
        return open_all()
    # A save follows a link to its target and leaves the manifest beside that, under the target's name.
    beside = os.path.islink(path) and not os.path.lexists(path + MANIFEST_SUFFIX)
    folder, name = os.path.split(os.path.realpath(path) if beside else path)
    with open_directory(folder or ".", follow_symlinks=options.follow_symlinks) as root:
        opened = _with_manifest(root, name, options, open_all)
    if opened.manifest is not None:
        opened.manifest = replace(opened.manifest, names=(name,))
    return opened


def _with_manifest(
    root: Root, stem: str, options: OpenOptions, open_all: Callable[[], OpenCheckpoint]
) -> OpenCheckpoint:
    """Open a checkpoint, and read its manifest where that is wanted.

    It is read before and after: a save that commits meanwhile changes both it and the files, and whatever was opened
    is spoken of by one of the two texts.
    """
    if not options.with_manifest:
        return open_all()
    name = stem + MANIFEST_SUFFIX
    before = _read_manifest(root, name)
    opened = open_all()
    try:
        texts = dict.fromkeys(text for text in (before, _read_manifest(root, name)) if text is not None)
    except BaseException:
        opened.close()
        raise
    names = tuple(header.shard for header in opened.headers)
    opened.manifest = ManifestText(os.path.join(root.path, name), tuple(texts), names)
    return opened


def _read_manifest(root: Root, name: str) -> bytes | None:
    try:
        file = root.open(name)
    except CheckpointNotFoundError:
        return None
    try:
        nbytes = file.identity.nbytes
        if nbytes > MAX_MANIFEST_BYTES:
            raise LimitError(
                "the manifest is too long", path=file.path, expected=f"at most {MAX_MANIFEST_BYTES} bytes", found=nbytes
            )
        return _read(file, 0, nbytes)
    finally:
        file.close()


def _open_root(root: Root, index_name: str | None, options: OpenOptions, check: Callable[[], None]) -> OpenCheckpoint:
    """Open what a directory holds; if a save replaced it between the look and the opening, open the new one."""
    named = index_name is not None  # the caller named the index itself: it may be a link to anywhere
    looked: list[object] = []
    while True:
        check()
        index_file, single = (index_name, "") if index_name else _choose(root)
        text = _read_index(root, index_file, named, options) if index_file else b""
        try:
            index, names, stem = None, [single], single
            if index_file is not None:
                index = parse_index(text, path=os.path.join(root.path, index_file), limits=options.limits)
                names, stem = list(index.shards), index_file.removesuffix(_INDEX_SUFFIX)
            openers = {name: partial(root.open, name) for name in names}
            return _with_manifest(root, stem, options, partial(_open_shards, root.path, openers, index, options, check))
        except CheckpointNotFoundError:
            # Old shards go when the new index is in place. If index and listing say what they said, it is missing.
            if looked == [index_file, single, text]:
                raise
            looked = [index_file, single, text]


def _read_index(root: Root, name: str, named: bool, options: OpenOptions) -> bytes:
    file = root.open(name, trusted=named)
    try:
        nbytes = file.identity.nbytes
        if nbytes > options.limits.header_bytes:
            raise LimitError(
                "the index is larger than the limit",
                path=file.path,
                expected=options.limits.header_bytes,
                found=nbytes,
            )
        return _read(file, 0, nbytes)
    finally:
        file.close()


def _choose(root: Root) -> tuple[str | None, str]:
    """Return the index of a directory, or the one file that it holds."""
    names = root.listdir()
    if INDEX_NAME in names:
        return INDEX_NAME, ""
    indices = [name for name in names if name.endswith(_SUFFIX + _INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(_SUFFIX)]
    if len(indices) == 1:
        return indices[0], ""
    if not indices and any(name.startswith(_STAGING) for name in names):
        # A save that was cut off before its index was in place: what it moved in counts for nothing.
        files = [name for name in files if not _SHARD.search(name)]
    if not indices and len(files) == 1:
        return None, files[0]
    if not indices and not files:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")
        raise CheckpointNotFoundError(
            "the directory holds no checkpoint; give a directory with .safetensors files, or a file",
            path=root.path,
            expected=f"{INDEX_NAME} or one *{_SUFFIX}",
            found=shown or "an empty directory",
        )
    raise AmbiguousCheckpointError(
        f"several candidates and no {INDEX_NAME} that chooses; give the path of the one you mean",
        path=root.path,
        found=", ".join(indices or files),
    )


def _open_shards(
    path: str,
    openers: Mapping[str, Callable[[], Source]],
    index: ShardIndex | None,
    options: OpenOptions,
    check: Callable[[], None],
) -> OpenCheckpoint:
    files: list[Source] = []
    try:
        for open_one in openers.values():
            check()
            files.append(_shard(open_one, index))
        headers = []
        for name, file in zip(openers, files, strict=True):
            check()
            headers.append(_read_header(file, name, options.limits))
        if index is not None:
            for warning in check_against_shards(
                index, dict(zip(openers, headers, strict=True)), strict=options.strict, path=path
            ):
                logger.warning("%s", warning)
        described: list[Mapping[str, Any]] = [header.metadata for header in headers]
        described += [index.metadata] if index is not None else []
        metadata = {key: value for one in described for key, value in one.items()}
        aliases = {alias: target for one in described for alias, target in _aliases(one, headers, path).items()}
    except BaseException:
        for file in files:
            file.close()
        raise
    return OpenCheckpoint(path, files, headers, metadata, aliases)


def _shard(open_one: Callable[[], Source], index: ShardIndex | None) -> Source:
    try:
        return open_one()
    except CheckpointNotFoundError as error:
        if index is None:
            raise
        raise CheckpointNotFoundError(
            "the index names a shard that is not there; the download may be incomplete", path=error.path
        ) from None


def _read_header(file: Source, shard: str, limits: Limits) -> Header:
    """Read and parse one header; a small one comes with its length in a single read."""
    file_bytes = file.identity.nbytes
    head = _read(file, 0, min(file_bytes, _FIRST_READ_BYTES))
    nbytes = header_nbytes(head[:PREFIX_BYTES], file_bytes=file_bytes, limits=limits, path=file.path)
    end = PREFIX_BYTES + nbytes
    raw = head[PREFIX_BYTES:end] if end <= len(head) else _read(file, PREFIX_BYTES, nbytes)
    return parse_header(raw, file_bytes=file_bytes, path=file.path, shard=shard, limits=limits)


def _read(file: Source, offset: int, nbytes: int) -> bytes:
    if not nbytes:
        return b""
    region = allocate(nbytes)
    file.read_into(offset, [region.sub(0, nbytes)])
    return region.tobytes()


def _aliases(metadata: Mapping[str, Any], headers: list[Header], path: str) -> dict[str, str]:
    """Return the aliases that stio's own metadata key records, checked against the headers."""
    text = metadata.get(ALIASES_KEY)
    if text is None:
        return {}
    if not isinstance(text, str):
        raise FormatError(f"{ALIASES_KEY} is no text", path=path, found=type(text).__name__)

    try:
        aliases = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{ALIASES_KEY} is not JSON", path=path) from error
    if not isinstance(aliases, dict):
        raise FormatError(f"{ALIASES_KEY} is no object", path=path, found=type(aliases).__name__)
    known = {name for header in headers for name in header.names}
    for alias, target in aliases.items():
        if not isinstance(target, str) or target not in known or alias in known:
            raise FormatError(
                f"{ALIASES_KEY} must lead from names without data to names of tensors",
                path=path,
                found=f"{alias!r}: {target!r}",
            )
    return aliases
