"""Opens a checkpoint: opens every file, parses and checks every header, reads no tensor.

An open determines the kind of a source (a file, a directory with an index or with one file, an index), opens all shards
that are needed through one directory before the first read, and compares the index with the headers. It needs no torch.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stio.errors import (
    AmbiguousCheckpointError,
    ChangedDuringReadError,
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    LimitError,
    StioError,
    StorageError,
    TensorNotFoundError,
    listed,
    printable,
)
from stio.format.file_kinds import FileKind, kind_of
from stio.format.gil_slices import ROWS
from stio.format.header import PREFIX_BYTES, Header, TensorInfo, header_nbytes, parse_header
from stio.format.index import ShardIndex, check_against_shards, parse_index
from stio.format.manifest import MAX_MANIFEST_BYTES
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX, MANIFEST_SUFFIX, is_of_save
from stio.format.other_sources import (
    advice_for_index,
    advice_for_missing,
    advice_for_names,
    refuse_pickle_at_url,
)
from stio.format.shared import ALIASES_KEY, parse_aliases
from stio.runtime.limits import Limits, advice_on_limit
from stio.runtime.memory import allocate
from stio.runtime.operation import start_thread
from stio.runtime.urls import is_url
from stio.storage.base import ParallelRoot, Root, Source
from stio.storage.open import OneFile, most_open_files, open_directory, open_file, open_url

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
    """Open files and checked headers of one checkpoint.

    The files of a checkpoint with more shards than `most_open_files` are closed after their headers were read.
    `open_files` opens them again, relative to the same directory, and only if they are still the same files.
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
    manifest: ManifestText | None = None
    """The manifest of the checkpoint, if it was opened `with_manifest`."""
    openers: Sequence[Callable[[], Source]] = ()
    """Opens the file of each shard; empty if the files stay open."""
    root: Root | None = None
    """The directory behind `openers`, if this object closes it."""

    def open_files(self, shards: Iterable[int], owned: ExitStack) -> Sequence[Source]:
        """Return the files of all shards, of which these are open until `owned` is closed.

        Raises:
            ChangedDuringReadError: A file was removed or replaced since the checkpoint was opened.
            StorageError: The operating system reported an error, such as too many open files.
        """
        if not self.openers:
            return self.files
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

    def header_of(self, name: str) -> Header:
        """Return the header that holds a tensor.

        Raises:
            TensorNotFoundError: No header has a tensor of this name.
        """
        for header in self.headers:
            if name in header:
                return header
        raise TensorNotFoundError("the checkpoint has no such tensor", path=self.path, requested=name)

    def info(self, name: str) -> TensorInfo:
        """Return the entry of a tensor in its header; for an alias, the entry of its target."""
        target = self.aliases.get(name, name)
        return self.header_of(target).info(target)

    def dtypes_and_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of all tensors by name, as in the format; aliases are not among them."""
        return {
            name: (dtype, shape)
            for header in self.headers
            for name, dtype, shape in zip(header.names, header.dtypes, header.shapes, strict=True)
        }

    def close(self) -> None:
        """Close all files. Idempotent."""
        files, self.files = self.files, []
        for file in files:
            file.close()
        root, self.root = self.root, None
        if root is not None:
            root.close()

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
    shards_of: Callable[[ShardIndex], Collection[str] | None] = lambda index: None,
    replacement: Callable[[Source], Source] = lambda file: file,
    check: Callable[[], None] = lambda: None,
    warn: Callable[[str], object] = lambda warning: logger.warning("%s", warning),
) -> OpenCheckpoint:
    """Open a checkpoint; blocks.

    Args:
        source: A `.safetensors` file, an index, a directory, a URL of one of these, or a `Root`.
        limits: Bounds on what a file may request.
        strict: Tensors that the index does not name are an error; with False, a warning.
        follow_symlinks: Allow shards that are links to a place outside the checkpoint's root.
        with_manifest: Read the manifest beside the checkpoint too (`stio.format.manifest` parses it).
        shards_of: Returns the shards of an index to open, None for all; the others are not opened. With a manifest all
            are.
        replacement: Called with each shard that was opened; returns it, or another file with the same content and the
            same identity, and has closed the shard then.
        check: Called between files; may raise to end the call.
        warn: Called with a sentence for each difference that is no error. By default it is logged.

    Raises:
        CheckpointNotFoundError: There is no file at this path, or no checkpoint in the directory.
        AmbiguousCheckpointError: A directory has several candidates and no index.
        FormatError: A header is wrong.
        IndexFormatError: The index is wrong, or does not fit the shards.
        UnsafePathError: The index leads out of the directory.
        StorageError: The operating system reported an error.
    """
    return _Opening(
        limits or Limits(), strict, follow_symlinks, with_manifest, shards_of, replacement, check, warn
    ).open(source)


@dataclass(frozen=True, slots=True)
class _Opening:
    """One call of `open_checkpoint`."""

    limits: Limits
    strict: bool
    follow_symlinks: bool
    with_manifest: bool
    shards_of: Callable[[ShardIndex], Collection[str] | None]
    replacement: Callable[[Source], Source]
    check: Callable[[], None]
    warn: Callable[[str], object]

    def open(self, source: str | os.PathLike[str] | Root) -> OpenCheckpoint:
        if isinstance(source, Root):
            return self._in_root(source, None)
        if not isinstance(source, str | bytes | os.PathLike):
            raise TypeError(f"a source must be a path, a URL or a Root (see stio.testing), not {type(source).__name__}")
        path = os.fsdecode(source)
        if is_url(path):
            return self._at_url(path)
        try:
            return self._at_path(path)
        except CheckpointNotFoundError as error:
            if not os.path.lexists(path):
                _advise(error, advice_for_missing(path, parent_exists=os.path.isdir(path.partition("/")[0])))
            raise
        except IndexFormatError as error:
            _advise(error, advice_for_index(path))
            raise

    def _at_url(self, url: str) -> OpenCheckpoint:
        refuse_pickle_at_url(url)
        root, name = open_url(url)
        try:
            if name and not name.endswith(INDEX_SUFFIX):
                root = OneFile(root, name)
            opened = self._in_root(root, name if name.endswith(INDEX_SUFFIX) else None)
            opened.path = f"{root.path.rstrip('/')}/{name}" if name else root.path
            return opened
        except IndexFormatError as error:
            _advise(error, advice_for_index(name))
            raise

    def _at_path(self, path: str) -> OpenCheckpoint:
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
        with ExitStack() as closing_root:
            root = closing_root.enter_context(open_directory(path, follow_symlinks=self.follow_symlinks))
            opened = self._in_root(root, index_name)
            if opened.openers:
                opened.root = root
                closing_root.pop_all()
            return opened

    def _in_root(self, root: Root, index_name: str | None) -> OpenCheckpoint:
        """Open the checkpoint of a directory; if a save replaces it after the listing, open the new one."""
        named = index_name is not None  # the caller passed the path of the index: it may be a link to any place
        last: list[object] = []
        while True:
            self.check()
            index_file, single = (index_name, "") if index_name else choose(root)
            text = self._index_text(root, index_file, named) if index_file else b""
            try:
                index, names, stem = None, [single], single
                if index_file is not None:
                    index = parse_index(text, path=os.path.join(root.path, index_file), limits=self.limits)
                    index = self._part(index)
                    names, stem = list(index.shards), index_file.removesuffix(INDEX_SUFFIX)
                openers = {name: partial(self._replaced, partial(root.open, name)) for name in names}
                if isinstance(root, ParallelRoot):
                    root.open_ahead(names)
                shards = partial(self._shards, root.path, openers, index)
                return _with_manifest(root, stem, shards) if self.with_manifest else shards()
            except CheckpointNotFoundError:
                # A save removes old shards after the new index is in place. If index and listing are unchanged, a
                # shard is missing.
                if last == [index_file, single, text]:
                    raise
                last = [index_file, single, text]

    def _part(self, index: ShardIndex) -> ShardIndex:
        """Return the part of an index that names the shards to open."""
        chosen = None if self.with_manifest else self.shards_of(index)
        return index if chosen is None else index.part(chosen)

    def _replaced(self, open_one: Callable[[], Source]) -> Source:
        file = open_one()
        try:
            return self.replacement(file)
        except BaseException:
            file.close()
            raise

    def _index_text(self, root: Root, name: str, named: bool) -> bytes:
        with closing(root.open(name, trusted=named)) as file:
            nbytes = file.identity.nbytes
            if nbytes > self.limits.header_bytes:
                raise LimitError(
                    "the index is larger than the limit `header_bytes`" + advice_on_limit("header_bytes"),
                    path=file.path,
                    expected=self.limits.header_bytes,
                    found=nbytes,
                )
            return _read(file, 0, nbytes)

    def _shards(
        self, path: str, openers: Mapping[str, Callable[[], Source]], index: ShardIndex | None
    ) -> OpenCheckpoint:
        """Open all files, then read and check all headers; or one file after the other, if they are too many."""
        files: list[Source] = []
        headers: list[Header] = []
        in_turns = len(openers) > most_open_files()
        try:
            for name, open_one in openers.items():
                self.check()
                files.append(_shard(open_one, index))
                if in_turns:
                    headers.append(self._header(files[-1], name))
                    files[-1].close()
            for name, file in zip(openers, files, strict=True) if not in_turns else ():
                self.check()
                headers.append(self._header(file, name))
            if index is not None:
                for warning in check_against_shards(
                    index, dict(zip(openers, headers, strict=True)), strict=self.strict, path=path
                ):
                    self.warn(warning)
            described: list[Mapping[str, Any]] = [header.metadata for header in headers]
            described += [index.metadata] if index is not None else []
            metadata = {key: value for one in described for key, value in one.items()}
            aliases = {
                alias: target
                for one in described
                for alias, target in _aliases(one, headers, index, path, self.limits).items()
            }
        except BaseException:
            for file in files:
                file.close()
            raise
        again = list(openers.values()) if in_turns else ()
        return OpenCheckpoint(path, files, headers, metadata, aliases, openers=again)

    def _header(self, file: Source, shard: str) -> Header:
        """Read and parse one header; a small one comes with its length in a single read."""
        file_bytes = file.identity.nbytes
        head = _read(file, 0, min(file_bytes, _FIRST_READ_BYTES))
        try:
            nbytes = header_nbytes(head[:PREFIX_BYTES], file_bytes=file_bytes, limits=self.limits, path=file.path)
        except FormatError as error:
            kind = _kind_of(file)
            if kind is None:
                raise
            raise FormatError(kind.refusal(file.path), path=file.path) from error
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
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return None  # a cache that may not be filled does not have it
    with closing(file):
        nbytes = file.identity.nbytes
        if nbytes > MAX_MANIFEST_BYTES:
            raise LimitError(
                "the manifest is too long", path=file.path, expected=f"at most {MAX_MANIFEST_BYTES} bytes", found=nbytes
            )
        return _read(file, 0, nbytes)


def choose(root: Root) -> tuple[str | None, str]:
    """Return the index of a directory, or the one file that it holds."""
    if isinstance(root, OneFile):
        return None, root.name
    names = root.listdir()
    if INDEX_NAME in names:
        return INDEX_NAME, ""
    indices = [name for name in names if name.endswith(FILE_SUFFIX + INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(FILE_SUFFIX)]
    if len(indices) == 1:
        return indices[0], ""
    if not indices:  # shards with the id of a save are a checkpoint by their index alone: their save has not committed
        files = [name for name in files if not is_of_save(name)]
    if not indices and any(name.startswith(_STAGING) for name in names):
        # A save was interrupted before its index was in place: the shards that it has moved are not a checkpoint.
        files = [name for name in files if not _SHARD.search(name)]
    if not indices and len(files) == 1:
        return None, files[0]
    if not indices and not files:
        raise CheckpointNotFoundError(
            "the directory holds no checkpoint; give a directory with .safetensors files, or a file"
            + advice_for_names(names, root.path, partial(_kind_of_name, root)),
            path=root.path,
            expected=f"{INDEX_NAME} or one *{FILE_SUFFIX}",
            found=listed(names) if names else "an empty directory",
        )
    raise AmbiguousCheckpointError(
        f"the directory holds several checkpoints, and no {INDEX_NAME} selects one; give the path of the one you mean",
        path=root.path,
        found=listed(indices or files),
    )


def _kind_of(file: Source) -> FileKind | None:
    return kind_of(lambda begin, end: _read(file, begin, end - begin), file.identity.nbytes)


def _kind_of_name(root: Root, name: str) -> FileKind | None:
    with suppress(StioError), closing(root.open(name)) as file:
        return _kind_of(file)
    return None


def _advise(error: StioError, advice: str) -> None:
    """Add a clause to the message of an error that is raised again."""
    error.message += advice
    error.args = (error.message,)


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


def _aliases(
    metadata: Mapping[str, Any], headers: list[Header], index: ShardIndex | None, path: str, limits: Limits
) -> dict[str, str]:
    """Return the aliases in the metadata of stio, checked against the headers, and those of shards that are open."""
    text = metadata.get(ALIASES_KEY)
    if text is None:
        return {}
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
                f"{ALIASES_KEY} must lead from names without data to names of tensors",
                path=path,
                found=f"{printable(alias)!r}: {printable(target)!r}",
            )
    return {alias: target for alias, target in aliases.items() if target in known} if elsewhere else aliases
