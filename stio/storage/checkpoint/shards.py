"""The shards of one checkpoint: opened together, each header read and checked, all of them compared with the index.

`open_shards` opens every file before it reads the first header, so that a missing shard is an error before any read. A
checkpoint with more shards than the process may open descriptors keeps paths and identities only, and an
`OpenCheckpoint` opens its files again when they are read.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from stio import process
from stio.errors import (
    ChangedDuringReadError,
    CheckpointNotFoundError,
    FormatError,
    StorageError,
    TensorNotFoundError,
    UnsupportedDtypeError,
    printable,
)
from stio.format import ALIASES_KEY, PREFIX_BYTES, Header, TensorInfo, header_nbytes, parse_aliases, parse_header
from stio.format.delta import ID_KEY, Delta, Patch
from stio.format.files import FileKind, ShardIndex, check_shards, kind_of, why_packed
from stio.limits import Limits
from stio.runtime import start_thread
from stio.storage.base import RequestedSource, Root, Source, read_bytes
from stio.storage.checkpoint.caches import ObjectCache
from stio.storage.checks import broken_link
from stio.storage.local import LocalFile
from stio.storage.open import ReopenedFile, max_open_files

logger = logging.getLogger("stio")

_TOO_MANY = (errno.EMFILE, errno.ENFILE)

_MANY_TENSORS = 4096
"""More headers' entries than this are freed on a thread."""

_ENTRY_BYTES = 64
"""About the least that a tensor takes of a header."""

_FIRST_READ_BYTES = 128 << 10
"""Holds the headers of about 1,000 tensors, which then need no second request of a file behind a network."""

_FIRST_LOCAL_BYTES = 4 << 10
"""Of a local file. Its header is read exactly: for 150 tensors the first touch of 128 KiB of memory took 0.1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """How a checkpoint is opened."""

    limits: Limits = Limits()
    """Bounds on what a file may request."""
    strict: bool = True
    """Tensors that the index does not name are an error; with False, a warning."""
    follow_symlinks: bool = False
    """Allow shards that are links to a place outside the checkpoint's root."""
    with_manifest: bool = False
    """Read the manifest beside the checkpoint too (`stio.format.files.manifest` parses it)."""
    shards_of: Callable[[ShardIndex], Collection[str] | None] = lambda index: None
    """Returns the shards of an index to open, None for all; the others are not opened. With a manifest all are."""
    replacement: Callable[[Source], Source] = lambda file: file
    """Called with each shard behind a network that was opened; returns it, or another file with the same content and
    the same identity, and has closed the shard then."""
    allow_trailing: bool = False
    """Bytes after the last tensor of a file are a warning, and no error."""
    examine_others: bool = False
    """Read the headers of files beside the checkpoint too, and warn of tensors of the same names."""
    joins: bool = True
    """Open the base of a delta too. With False, the files of the delta alone: their tensors are no weights."""
    check: Callable[[], None] = lambda: None
    """Called between files; may raise to end the call."""
    warn: Callable[[str], object] = lambda warning: logger.warning("%s", warning)
    """Called with a sentence for each difference that is no error. By default it is logged."""


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
    """Open files and checked headers of one checkpoint.

    The files of a checkpoint with more shards than `max_open_files` are closed after their headers were read.
    `open_files` opens them again, relative to the same directory, and only if they are still the same files. If too
    many are needed at one time, each read opens its file.
    """

    path: str
    """Path that the caller passed."""
    files: list[Source]
    """Files, one for each shard: open, or known only by path and identity. Read from those of `open_files`."""
    headers: list[Header]
    """Headers, one for each shard."""
    metadata: Mapping[str, Any]
    """Text metadata of the shards and of their index."""
    aliases: Mapping[str, str]
    """Names that share another tensor's data, to that tensor's name."""
    index: str | None = None
    """Name of its index; None: it has none."""
    differing_metadata: frozenset[str] = frozenset()
    """Keys of the metadata with other values in one shard than in another; `metadata` has one of them."""
    index_names: Collection[str] = ()
    """Names of the tensors in the index, those of other shards too; empty if all shards are open."""
    manifest: ManifestText | None = None
    """The manifest of the checkpoint, if it was opened `with_manifest`."""
    openers: Sequence[Callable[[], Source]] = ()
    """Opens the file of each shard; empty if the files stay open."""
    root: Root | None = None
    """The directory of a URL, or that behind `openers`; this object closes it."""
    patches: Mapping[str, tuple[Patch, ...]] = field(default_factory=dict)
    """Of a delta: by name the elements that were changed since the file with the tensor was written, the oldest first.
    Who reads the tensor applies them."""
    delta: Delta | None = None
    """The description of a delta; None: it is a full checkpoint."""
    links: tuple[OpenCheckpoint, ...] = ()
    """Of a delta: the full checkpoint and all deltas up to this one, each as its own files have it; empty for a full
    checkpoint. `files` and `headers` are those of all links, one behind the other. This object closes them."""

    @property
    def id(self) -> str:
        """The id that stio gives to each save; empty if it has none."""
        found = self.metadata.get(ID_KEY)
        return found if isinstance(found, str) else ""

    def open_files(self, shards: Iterable[int], owned: ExitStack) -> Sequence[Source]:
        """Return the files of all shards, of which these can be read until `owned` is closed.

        Raises:
            ChangedDuringReadError: A file was removed or replaced since the checkpoint was opened.
            StorageError: The operating system reported an error, such as too many open files.
        """
        if not self.openers:
            return self.files
        shards = [*shards]
        if len(shards) <= max_open_files():
            try:
                return self._opened_again(shards, owned)
            except StorageError as error:
                if error.errno not in _TOO_MANY:
                    raise  # else the process has many other files open
        files = list(self.files)
        for shard in shards:
            before = files[shard]
            files[shard] = ReopenedFile(before.path, before.identity, partial(self._open_again, shard))
        return files

    def _opened_again(self, shards: Iterable[int], owned: ExitStack) -> Sequence[Source]:
        files = list(self.files)
        with ExitStack() as opening:
            for shard in shards:
                files[shard] = self._open_again(shard)
                opening.callback(files[shard].close)
            owned.push(opening.pop_all())
        return files

    def _open_again(self, shard: int) -> Source:
        before = self.files[shard]
        try:
            file = self.openers[shard]()
        except CheckpointNotFoundError as error:
            raise ChangedDuringReadError(
                "the file was removed since the checkpoint was opened; open the checkpoint again", path=error.path
            ) from error
        try:
            before.identity.require_same(file.identity, file.path)
        except BaseException:
            file.close()
            raise
        return file

    def fetch(self, cache: ObjectCache, *, budget_bytes: int) -> None:
        """Replace all files by files of a cache on disk; after an error all are closed."""
        before, nbytes = self.files, [file.identity.nbytes for file in self.files]
        with ExitStack() as undo:
            undo.callback(self.close)
            self.files = cache.fetch(before, nbytes, budget_bytes=budget_bytes, owned=undo)
            undo.pop_all()
        for old, new in zip(before, self.files, strict=True):
            if new is not old:
                old.close()

    def info(self, name: str) -> TensorInfo:
        """Return the entry of a tensor in its header; for an alias, the entry of its target.

        Raises:
            TensorNotFoundError: No header has a tensor of this name.
        """
        target = self.aliases.get(name, name)
        for header in self.headers:
            if target in header:
                return header.info(target)
        raise TensorNotFoundError("the checkpoint has no such tensor", path=self.path, requested=name)

    def dtypes_and_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of all tensors by name, as in the format; aliases are not among them."""
        return {
            name: (dtype, shape)
            for header in self.headers
            for name, dtype, shape in zip(header.names, header.dtypes, header.shapes, strict=True)
        }

    def apart(self) -> list[OpenCheckpoint]:
        """Return the full checkpoint of a chain and each delta, to compare it with its own manifest.

        Their files are those of this object, which closes them, and their tensors those that a load takes from them.
        """
        if not self.links:
            return [self]
        parts, end = list[OpenCheckpoint](), 0
        for link in self.links:
            begin, end = end, end + len(link.headers)
            part = slice(begin, end)
            files, headers, openers = self.files[part], self.headers[part], self.openers[part]
            parts.append(replace(link, files=files, headers=headers, openers=openers))
        return parts

    def require_plain(self) -> None:
        """Raise if the bytes of a file are not those of its tensors.

        Raises:
            UnsupportedDtypeError: Another program has compressed them; all files are closed then.
        """
        if why := why_packed(self.metadata):
            self.close()
            raise UnsupportedDtypeError(why, path=self.path)

    def close(self) -> None:
        """Close all files. Idempotent."""
        files, self.files = self.files, []
        for file in files:
            file.close()
        root, self.root = self.root, None
        if root is not None:
            root.close()
        for link in self.links:
            link.close()

    def discard(self) -> None:
        """Close, and free the headers on a thread, so that no event loop is blocked. The object is unusable then."""
        self.close()
        headers, self.headers = self.headers, []
        if sum(map(len, headers)) > _MANY_TENSORS:
            with suppress(RuntimeError):  # no more threads: the thread that drops the last reference frees them
                start_thread(partial(_clear, headers), name="discard")


def _clear(headers: list[Header]) -> None:
    for header in headers:
        header.clear()


def open_shards(
    path: str, openers: Mapping[str, Callable[[], Source]], index: ShardIndex | None, options: OpenOptions
) -> OpenCheckpoint:
    """Open all files, then read and check all headers; or one file after the other, if they are too many.

    Args:
        path: The checkpoint.
        openers: Opens the file of each shard, by its name.
        index: The index that names them.
        options: How they are opened.
    """
    try:
        return _open_shards(path, openers, index, options, len(openers) > 1 and len(openers) > max_open_files())
    except StorageError as error:
        if error.errno not in _TOO_MANY or len(openers) == 1:
            raise
    return _open_shards(path, openers, index, options, True)  # the process has many other files open


def _open_shards(
    path: str,
    openers: Mapping[str, Callable[[], Source]],
    index: ShardIndex | None,
    options: OpenOptions,
    in_turns: bool,
) -> OpenCheckpoint:
    files: list[Source] = []
    headers: list[Header] = []
    num_replaced = 0
    try:
        for name, open_file in openers.items():
            options.check()
            try:
                file = open_file()
            except CheckpointNotFoundError as error:
                if index is None:
                    raise
                message = "the index names a shard that does not exist; the download may be incomplete"
                raise CheckpointNotFoundError(message + broken_link(error.path or ""), path=error.path) from None
            files.append(file)
            # It has no descriptor; a file in its place has one. A check of a protocol takes 12 us.
            if not isinstance(file, LocalFile) and isinstance(file, RequestedSource):
                in_turns = False
                if num_replaced < max_open_files():
                    files[-1] = options.replacement(file)
                    num_replaced += not isinstance(files[-1], RequestedSource)
            if in_turns:
                headers.append(read_header(files[-1], name, options))
                files[-1].close()
        for name, file in zip(openers, files, strict=True) if not in_turns else ():
            options.check()
            headers.append(read_header(file, name, options))
        headers, warnings = check_shards(index, headers, strict=options.strict, path=path)
        for warning in warnings:
            options.warn(warning)
        metadata, differing = _metadata(headers, index)
        texts: list[object] = [header.metadata.get(ALIASES_KEY) for header in headers]
        aliases: dict[str, str] = {}
        for text in [*texts, None if index is None else index.metadata.get(ALIASES_KEY)]:
            if text is not None:
                aliases |= _aliases(text, headers, index, path, options.limits)
    except BaseException:
        for file in files:
            file.close()
        raise
    again = list(openers.values()) if in_turns else ()
    return OpenCheckpoint(path, files, headers, metadata, aliases, openers=again, differing_metadata=differing)


def _metadata(headers: Iterable[Header], index: ShardIndex | None) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the metadata of all shards and of the index, and its keys that have several values in the shards.

    The values of an index, which are those of the checkpoint, may be any JSON: they become text. Counts of the tensors
    stay numbers.
    """
    metadata: dict[str, Any] = {}
    differing: set[str] = set()
    for header in headers:
        for key, value in header.metadata.items():
            if metadata.get(key, value) != value:
                differing.add(key)
            metadata[key] = value
    for key, entry in index.metadata.items() if index is not None else ():
        is_kept = isinstance(entry, str) or key in ("total_size", "total_parameters")
        metadata[key] = entry if is_kept else json.dumps(entry, ensure_ascii=False)
        differing.discard(key)
    return metadata, frozenset(differing)


def read_header(file: Source, shard: str, options: OpenOptions, *, is_loaded: bool = True) -> Header:
    """Read and parse one header; a small one comes with its length in a single read.

    Args:
        file: The open file.
        shard: Its name in the checkpoint.
        options: How it is opened.
        is_loaded: Whether it belongs to the checkpoint.
    """
    file_bytes = file.identity.nbytes
    first_bytes = _FIRST_LOCAL_BYTES if isinstance(file, LocalFile) else _FIRST_READ_BYTES
    head = read_bytes(file, 0, min(file_bytes, first_bytes))
    try:
        nbytes = header_nbytes(head[:PREFIX_BYTES], file_bytes=file_bytes, limits=options.limits, path=file.path)
    except FormatError as error:
        kind = kind_of_file(file)
        if kind is None or kind.is_safetensors:
            raise
        raise FormatError(kind.refusal(file.path), path=file.path) from error
    end = PREFIX_BYTES + nbytes
    raw = head[PREFIX_BYTES:end] if end <= len(head) else read_bytes(file, PREFIX_BYTES, nbytes)
    with process.collection_paused(nbytes // _ENTRY_BYTES):
        header = parse_header(
            raw,
            file_bytes=file_bytes,
            path=file.path,
            shard=shard,
            limits=options.limits,
            allow_trailing=options.allow_trailing,
        )
    if options.allow_trailing and is_loaded and (trailing := file_bytes - header.data_start - header.data_bytes):
        options.warn(f"{printable(file.path)}: {trailing:,} bytes after the last tensor are left out")
    return header


def kind_of_file(file: Source) -> FileKind | None:
    """Return the kind of a file that is none of safetensors, by its content; None: it is not known."""
    return kind_of(lambda begin, end: read_bytes(file, begin, end - begin), file.identity.nbytes, file.path)


def _aliases(
    text: object, headers: list[Header], index: ShardIndex | None, path: str, limits: Limits
) -> dict[str, str]:
    """Return the aliases that metadata of stio names, checked against the headers: those of shards that are open."""
    if not isinstance(text, str):
        raise FormatError(f"{ALIASES_KEY} is not text", path=path, found=type(text).__name__)
    aliases = parse_aliases(text, path=path, max_aliases=limits.max_tensors)
    known = {name for header in headers for name in header.names}
    elsewhere = index.names_elsewhere if index is not None else frozenset()
    for alias, target in aliases.items():
        if target in elsewhere and alias not in known and alias not in elsewhere:
            continue
        if target not in known or alias in known:
            raise FormatError(
                f"{ALIASES_KEY} must lead from names without data to names of tensors; if a program has copied it from "
                "other tensors, save without it: safetensors.torch.save_file(load_file(FILE), NEW)",
                path=path,
                found=f"{printable(alias)!r}: {printable(target)!r}",
            )
    return {alias: target for alias, target in aliases.items() if target in known} if elsewhere else aliases
