"""Opens a checkpoint: opens every file, parses and checks every header, reads no tensor.

An open determines the kind of a source (a file, a directory with an index or with one file, an index), opens all shards
through one directory before the first read, and compares the index with the headers. It needs no torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
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
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX, MANIFEST_SUFFIX
from stio.format.shared import ALIASES_KEY
from stio.runtime.limits import Limits
from stio.runtime.memory import allocate
from stio.runtime.operation import start_thread
from stio.storage.base import Root, Source
from stio.storage.open import open_directory, open_file

logger = logging.getLogger("stio")

INDEX_NAME = "model.safetensors.index.json"
"""Name of the index that is used if a directory has several."""

_STAGING = ".stio-"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_FIRST_READ_BYTES = 128 << 10
"""Holds the headers of about 1,000 tensors, which then need no second read. A larger first read would cost more: the
first touch of memory is slow."""


@dataclass(frozen=True, slots=True)
class ManifestText:
    """The manifest beside a checkpoint, not parsed yet."""

    path: str
    """Its path, even if it does not exist."""
    texts: tuple[bytes, ...]
    """Its text before the files were opened, and the text after that if it differs; empty: there is no manifest."""
    names: tuple[str, ...]
    """Name in the manifest of each file of the checkpoint."""


@dataclass(slots=True)
class OpenCheckpoint:
    """Open files and checked headers of one checkpoint."""

    path: str
    """Path that the caller passed."""
    files: list[Source]
    """Open files, one for each shard."""
    headers: list[Header]
    """Headers, one for each shard."""
    metadata: Mapping[str, Any]
    """Text metadata of the shards and of their index."""
    aliases: Mapping[str, str]
    """Names that share another tensor's data, to that tensor's name."""
    manifest: ManifestText | None = None
    """The manifest of the checkpoint, if it was opened `with_manifest`."""

    def header_of(self, name: str) -> Header:
        """Return the header that holds a tensor.

        Raises:
            TensorNotFoundError: No header has a tensor of this name.
        """
        for header in self.headers:
            if name in header:
                return header
        raise TensorNotFoundError("the checkpoint has no such tensor", path=self.path, found=name)

    def info(self, name: str) -> TensorInfo:
        """Return the entry of a tensor in its header; for an alias, the entry of its target."""
        target = self.aliases.get(name, name)
        return self.header_of(target).info(target)

    def close(self) -> None:
        """Close all files. Idempotent."""
        files, self.files = self.files, []
        for file in files:
            file.close()

    def discard(self) -> None:
        """Close, and free the headers on a thread, so that no event loop is blocked. The object is unusable then."""
        self.close()
        headers, self.headers = self.headers, []
        if sum(map(len, headers)) > ROWS:
            with suppress(RuntimeError):  # no more threads: the thread that drops the last reference frees them
                start_thread(partial(_clear, headers), name="discard")


def _clear(headers: list[Header]) -> None:
    for header in headers:
        header.clear()


def open_checkpoint(
    source: str | os.PathLike[str] | Root,
    *,
    limits: Limits | None = None,
    strict: bool = True,
    follow_symlinks: bool = False,
    with_manifest: bool = False,
    check: Callable[[], None] = lambda: None,
) -> OpenCheckpoint:
    """Open a checkpoint; blocks.

    Args:
        source: A `.safetensors` file, an index, a directory, or a `Root`.
        limits: Bounds on what a file may request.
        strict: Tensors that the index does not name are an error; with False, a warning.
        follow_symlinks: Allow shards that are links to a place outside the checkpoint's root.
        with_manifest: Read the manifest beside the checkpoint too (`stio.format.manifest` parses it).
        check: Called between files; may raise to end the call.

    Raises:
        CheckpointNotFoundError: There is no file at this path, or no checkpoint in the directory.
        AmbiguousCheckpointError: A directory has several candidates and no index.
        FormatError: A header is wrong.
        IndexFormatError: The index is wrong, or does not fit the shards.
        UnsafePathError: The index leads out of the directory.
        StorageError: The operating system reported an error.
    """
    return _Opening(limits or Limits(), strict, follow_symlinks, with_manifest, check).open(source)


@dataclass(frozen=True, slots=True)
class _Opening:
    """One call of `open_checkpoint`."""

    limits: Limits
    strict: bool
    follow_symlinks: bool
    with_manifest: bool
    check: Callable[[], None]

    def open(self, source: str | os.PathLike[str] | Root) -> OpenCheckpoint:
        if isinstance(source, Root):
            return self._in_root(source, None)
        if not isinstance(source, str | bytes | os.PathLike):
            raise TypeError(f"a source is a path or a storage.base.Root, not {type(source).__name__}")
        path = os.fsdecode(source)
        if path.endswith(INDEX_SUFFIX):
            return self._in_directory(os.path.dirname(path) or ".", os.path.basename(path))
        if not path.endswith(FILE_SUFFIX) and os.path.isdir(path):
            return self._in_directory(path, None)
        try:
            return self._single(path)
        except StorageError:
            if not os.path.isdir(path):
                raise
        return self._in_directory(path, None)  # a directory that is named like a file

    def _single(self, path: str) -> OpenCheckpoint:
        """Open one file that the caller named."""
        shards = partial(self._shards, path, {os.path.basename(path): lambda: open_file(path)}, None)
        if not self.with_manifest:
            return shards()
        # A save follows a link to its target, and writes the manifest beside that, with the target's name.
        beside = os.path.islink(path) and not os.path.lexists(path + MANIFEST_SUFFIX)
        folder, name = os.path.split(os.path.realpath(path) if beside else path)
        with open_directory(folder or ".", follow_symlinks=self.follow_symlinks) as root:
            opened = _with_manifest(root, name, shards)
        if opened.manifest is not None:
            opened.manifest = replace(opened.manifest, names=(name,))
        return opened

    def _in_directory(self, path: str, index_name: str | None) -> OpenCheckpoint:
        with open_directory(path, follow_symlinks=self.follow_symlinks) as root:
            return self._in_root(root, index_name)

    def _in_root(self, root: Root, index_name: str | None) -> OpenCheckpoint:
        """Open the checkpoint of a directory; if a save replaces it after the listing, open the new one."""
        named = index_name is not None  # the caller passed the path of the index: it may be a link to any place
        last: list[object] = []
        while True:
            self.check()
            index_file, single = (index_name, "") if index_name else _choose(root)
            text = self._index_text(root, index_file, named) if index_file else b""
            try:
                index, names, stem = None, [single], single
                if index_file is not None:
                    index = parse_index(text, path=os.path.join(root.path, index_file), limits=self.limits)
                    names, stem = list(index.shards), index_file.removesuffix(INDEX_SUFFIX)
                openers = {name: partial(root.open, name) for name in names}
                shards = partial(self._shards, root.path, openers, index)
                return _with_manifest(root, stem, shards) if self.with_manifest else shards()
            except CheckpointNotFoundError:
                # A save removes old shards after the new index is in place. If index and listing are unchanged, a
                # shard is missing.
                if last == [index_file, single, text]:
                    raise
                last = [index_file, single, text]

    def _index_text(self, root: Root, name: str, named: bool) -> bytes:
        with closing(root.open(name, trusted=named)) as file:
            nbytes = file.identity.nbytes
            if nbytes > self.limits.header_bytes:
                raise LimitError(
                    "the index is larger than the limit",
                    path=file.path,
                    expected=self.limits.header_bytes,
                    found=nbytes,
                )
            return _read(file, 0, nbytes)

    def _shards(
        self, path: str, openers: Mapping[str, Callable[[], Source]], index: ShardIndex | None
    ) -> OpenCheckpoint:
        """Open all files, then read and check all headers."""
        files: list[Source] = []
        try:
            for open_one in openers.values():
                self.check()
                files.append(_shard(open_one, index))
            headers = []
            for name, file in zip(openers, files, strict=True):
                self.check()
                headers.append(self._header(file, name))
            if index is not None:
                for warning in check_against_shards(
                    index, dict(zip(openers, headers, strict=True)), strict=self.strict, path=path
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

    def _header(self, file: Source, shard: str) -> Header:
        """Read and parse one header; a small one comes with its length in a single read."""
        file_bytes = file.identity.nbytes
        head = _read(file, 0, min(file_bytes, _FIRST_READ_BYTES))
        nbytes = header_nbytes(head[:PREFIX_BYTES], file_bytes=file_bytes, limits=self.limits, path=file.path)
        end = PREFIX_BYTES + nbytes
        raw = head[PREFIX_BYTES:end] if end <= len(head) else _read(file, PREFIX_BYTES, nbytes)
        return parse_header(raw, file_bytes=file_bytes, path=file.path, shard=shard, limits=self.limits)


def _with_manifest(root: Root, stem: str, open_shards: Callable[[], OpenCheckpoint]) -> OpenCheckpoint:
    """Open a checkpoint, and read its manifest before and after that.

    A save that commits in between changes both the manifest and the files: one of the two texts fits the open files.
    """
    name = stem + MANIFEST_SUFFIX
    before = _read_manifest(root, name)
    opened = open_shards()
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
    with closing(file):
        nbytes = file.identity.nbytes
        if nbytes > MAX_MANIFEST_BYTES:
            raise LimitError(
                "the manifest is too long", path=file.path, expected=f"at most {MAX_MANIFEST_BYTES} bytes", found=nbytes
            )
        return _read(file, 0, nbytes)


def _choose(root: Root) -> tuple[str | None, str]:
    """Return the index of a directory, or the one file that it holds."""
    names = root.listdir()
    if INDEX_NAME in names:
        return INDEX_NAME, ""
    indices = [name for name in names if name.endswith(FILE_SUFFIX + INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(FILE_SUFFIX)]
    if len(indices) == 1:
        return indices[0], ""
    if not indices and any(name.startswith(_STAGING) for name in names):
        # A save was interrupted before its index was in place: the shards that it has moved are not a checkpoint.
        files = [name for name in files if not _SHARD.search(name)]
    if not indices and len(files) == 1:
        return None, files[0]
    if not indices and not files:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")
        raise CheckpointNotFoundError(
            "the directory holds no checkpoint; give a directory with .safetensors files, or a file",
            path=root.path,
            expected=f"{INDEX_NAME} or one *{FILE_SUFFIX}",
            found=shown or "an empty directory",
        )
    raise AmbiguousCheckpointError(
        f"several candidates and no {INDEX_NAME} that chooses; give the path of the one you mean",
        path=root.path,
        found=", ".join(indices or files),
    )


def _shard(open_one: Callable[[], Source], index: ShardIndex | None) -> Source:
    try:
        return open_one()
    except CheckpointNotFoundError as error:
        if index is None:
            raise
        raise CheckpointNotFoundError(
            "the index names a shard that does not exist; the download may be incomplete", path=error.path
        ) from None


def _read(file: Source, offset: int, nbytes: int) -> bytes:
    if not nbytes:
        return b""
    region = allocate(nbytes)
    file.read_into(offset, [region.sub(0, nbytes)])
    return region.tobytes()


def _aliases(metadata: Mapping[str, Any], headers: list[Header], path: str) -> dict[str, str]:
    """Return the aliases in the metadata of stio, checked against the headers."""
    text = metadata.get(ALIASES_KEY)
    if text is None:
        return {}
    if not isinstance(text, str):
        raise FormatError(f"{ALIASES_KEY} is not text", path=path, found=type(text).__name__)

    try:
        aliases = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{ALIASES_KEY} is not JSON", path=path) from error
    if not isinstance(aliases, dict):
        raise FormatError(f"{ALIASES_KEY} is not an object", path=path, found=type(aliases).__name__)
    known = {name for header in headers for name in header.names}
    for alias, target in aliases.items():
        if not isinstance(target, str) or target not in known or alias in known:
            raise FormatError(
                f"{ALIASES_KEY} must lead from names without data to names of tensors",
                path=path,
                found=f"{alias!r}: {target!r}",
            )
    return aliases
