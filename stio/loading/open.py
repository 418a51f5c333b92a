"""Opens a checkpoint: opens every file, parses and checks every header, reads no tensor.

An open determines the kind of a source (a file, a directory with an index or with one file, an index), opens all shards
that are needed through one directory before the first read, and compares the index with the headers. It needs no torch.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stio.errors import (
    ChangedDuringReadError,
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    LimitError,
    StioError,
    StorageError,
    TensorNotFoundError,
    UnsupportedDtypeError,
    listed,
    printable,
)
from stio.format.files.directory import NamedCheckpoint, choose
from stio.format.files.index import ShardIndex, check_shards, parse_index, require_one_set
from stio.format.files.manifest import Manifest
from stio.format.files.names import MANIFEST_SUFFIX, FileName
from stio.format.files.other_kinds import FileKind, advice_for_missing, kind_of, why_packed
from stio.format.header import PREFIX_BYTES, Header, TensorInfo, header_nbytes, parse_header
from stio.format.shared import ALIASES_KEY, parse_aliases
from stio.runtime.limits import Limits, advice_on_limit
from stio.runtime.operation import start_thread
from stio.runtime.process import collection_paused
from stio.runtime.text import is_url, without_secrets
from stio.storage.base import ParallelRoot, RequestedSource, Root, Source, read_bytes
from stio.storage.checks import advice_for_hub_cache, broken_link, commits_in
from stio.storage.open import ReopenedFile, SingleFileRoot, is_hub, max_open_files, open_directory, open_file, open_url

logger = logging.getLogger("stio")

_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_MAX_EXAMINED = 8
"""Files beside an index whose headers are read: a directory may hold thousands, such as adapters."""

_MODELS = ("model", "pytorch_model", "diffusion_pytorch_model")
_PICKLED_MODEL = ("pytorch_model.bin", "pytorch_model-", "diffusion_pytorch_model.bin", "diffusion_pytorch_model-")
"""Beginnings of the names of whole models in files of `torch.save`; the other names are those of their safetensors."""

_MANY_TENSORS = 4096
"""More headers' entries than this are freed on a thread."""

_ENTRY_BYTES = 64
"""About the least that a tensor takes of a header."""

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


def open_checkpoint(
    source: str | os.PathLike[str] | Root,
    *,
    limits: Limits | None = None,
    strict: bool = True,
    follow_symlinks: bool = False,
    with_manifest: bool = False,
    shards_of: Callable[[ShardIndex], Collection[str] | None] = lambda index: None,
    replacement: Callable[[Source], Source] = lambda file: file,
    allow_trailing: bool = False,
    examine_others: bool = False,
    check: Callable[[], None] = lambda: None,
    warn: Callable[[str], object] = lambda warning: logger.warning("%s", warning),
) -> OpenCheckpoint:
    """Open a checkpoint; blocks.

    Args:
        source: A `.safetensors` file, an index, a directory, a URL of one of these, or a `Root`.
        limits: Bounds on what a file may request.
        strict: Tensors that the index does not name are an error; with False, a warning.
        follow_symlinks: Allow shards that are links to a place outside the checkpoint's root.
        with_manifest: Read the manifest beside the checkpoint too (`stio.format.files.manifest` parses it).
        shards_of: Returns the shards of an index to open, None for all; the others are not opened. With a manifest all
            are.
        replacement: Called with each shard that was opened; returns it, or another file with the same content and the
            same identity, and has closed the shard then.
        allow_trailing: Bytes after the last tensor of a file are a warning, and no error.
        examine_others: Read the headers of files beside the checkpoint too, and warn of tensors of the same names.
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
        limits or Limits(),
        strict,
        follow_symlinks,
        with_manifest,
        shards_of,
        replacement,
        allow_trailing,
        examine_others,
        check,
        warn,
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
    allow_trailing: bool
    examine_others: bool
    check: Callable[[], None]
    warn: Callable[[str], object]

    def open(self, source: str | os.PathLike[str] | Root) -> OpenCheckpoint:
        if isinstance(source, Root):
            return self._in_root(source, None)
        if not isinstance(source, str | bytes | os.PathLike):
            raise TypeError(f"a source must be a path, a URL or a storage.base.Root, not {type(source).__name__}")
        path = os.fsdecode(source)
        if not path:
            raise CheckpointNotFoundError("the path is empty; give a file, a directory or a URL")
        try:
            return self._at_url(path) if is_url(path) else self._at_path(path)
        except CheckpointNotFoundError as error:
            if error.path is not None:
                error.path = without_secrets(error.path)  # a URL in which a slash is missing
            if is_url(path):
                raise
            if commits := commits_in(path):
                _advise(
                    error, f"; this is a repository in the hub's cache: give one of its snapshots/{listed(commits)}"
                )
            elif not os.path.lexists(path):
                _advise(error, advice_for_missing(path, parent_exists=os.path.isdir(path.partition("/")[0])))
            raise
        except (FormatError, IndexFormatError) as error:
            if error.path and not isinstance(error, LimitError):
                _advise(error, advice_for_hub_cache(error.path))
            raise

    def _at_url(self, url: str) -> OpenCheckpoint:
        """Open what a URL names. Where its name does not decide, its content does: a file, or else a directory."""
        root, name = open_url(url)
        if is_hub(url) or FileName(name).is_checkpoint or FileName(name).is_index:
            return self._named_at(root, name)
        link = failure = None
        # With a query it is often a link for downloads, and the server may have the same answer below it.
        if not name and "?" not in url:
            try:
                return self._named_at(root, "")
            except CheckpointNotFoundError:
                with suppress(StioError):
                    link = _link(url)
                if link is None:
                    raise
        else:
            try:
                link = _link(url)
            except StioError as error:
                failure = error
        if link is not None:
            return self._named_at(*link)
        try:
            return self._named_at(open_url(url, is_file=False)[0], "")
        except (CheckpointNotFoundError, StorageError):
            if not name and not isinstance(failure, StorageError):
                raise
        if failure is not None:
            raise failure
        return self._named_at(root, name)  # what it is instead is the error

    def _named_at(self, root: Root, name: str) -> OpenCheckpoint:
        """Open a file or an index by its name in a store, or without a name the directory."""
        opening, file = self, FileName(name)
        if name and not file.is_index:
            root = SingleFileRoot(root, name)
            if not file.is_checkpoint:  # a link: its content alone shows that it is a file
                opening = replace(self, with_manifest=False)
        opened = opening._in_root(root, name if file.is_index else None)
        opened.path = f"{root.path.rstrip('/')}/{name}" if name else root.path
        opened.root = root
        return opened

    def _at_path(self, path: str) -> OpenCheckpoint:
        if os.path.isdir(path):  # also one that is named like a file or an index
            return self._in_directory(path, None)
        folder, name = os.path.split(path)
        return self._in_directory(folder or ".", name) if FileName(name).is_index else self._single(path)

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
        last: list[object] = []
        while True:
            self.check()
            # The caller passed the path of the index: it may be a link to any place.
            names, found = ([], NamedCheckpoint.of_index(index_name)) if index_name is not None else _chosen(root)
            text = b"" if found.index is None else self._index_text(root, found.index, index_name is not None)
            try:
                return self._named(root, found, text, names)
            except CheckpointNotFoundError as error:
                # A save removes old shards after the new index is in place. If index and listing are unchanged, a
                # shard is missing.
                if last == [found, text]:
                    if self._are_gone(root, found, text, names):
                        if (whole := self._whole_beside(root, found, names)) is not None:
                            return self._named(root, whole, b"", names)
                        _advise(error, found.advice_for_gone_shards(names))
                    raise
                last = [found, text]

    def _named(self, root: Root, found: NamedCheckpoint, text: bytes, names: Sequence[str]) -> OpenCheckpoint:
        """Open a checkpoint that was chosen by its name.

        Args:
            root: The directory.
            found: The checkpoint.
            text: Content of its index.
            names: All names in the directory; none if the caller of stio chose the index.
        """
        whole_index = index = None
        files = found.files
        if found.index is not None:
            whole_index = parse_index(text, path=os.path.join(root.path, found.index), limits=self.limits)
            if names and not whole_index.shards and (whole := self._whole_beside(root, found, names)):
                return self._named(root, whole, b"", names)
            index = whole_index
            if not self.with_manifest and (wanted := self.shards_of(index)) is not None:
                index = index.part(wanted)
            files = index.shards
        openers = {name: partial(root.open, name) for name in files}
        if isinstance(root, ParallelRoot):
            root.open_ahead(files)
        shards = partial(self._shards, root.path, openers, index)
        opened = _with_manifest(root, found.whole, shards) if self.with_manifest else shards()
        opened.index = found.index
        if whole_index is not None and index is not whole_index:
            opened.index_names = whole_index.weight_map.keys()
        try:
            if found.index is None and not isinstance(root, SingleFileRoot):
                require_one_set(opened.headers, path=root.path)
            self._warn_of_others(root, found, files if whole_index is None else whole_index.shards, opened, names)
        except BaseException:
            opened.close()
            raise
        return opened

    def _warn_of_others(
        self, root: Root, found: NamedCheckpoint, files: Sequence[str], opened: OpenCheckpoint, names: Sequence[str]
    ) -> None:
        """Warn of files in the directory that a reader of it may take for the newer checkpoint."""
        same, others = found.beside(files, names)
        if self.examine_others and not is_hub(root.path):  # there it would be downloaded
            same += [name for name in others[:_MAX_EXAMINED] if self._has_names_of(root, name, opened)]
        if found.stem not in _MODELS:  # such as an adapter
            same += [name for name in names if name.startswith(_PICKLED_MODEL)]
        if same:
            self.warn(found.warning_of_others(root.path, same))

    def _has_names_of(self, root: Root, name: str, opened: OpenCheckpoint) -> bool:
        """Return whether a file has tensors with names that the checkpoint has."""
        try:
            with closing(root.open(name)) as file:
                found = self._header(file, name, is_loaded=False).names
                return any(name in opened.index_names or any(name in one for one in opened.headers) for name in found)
        except StioError:
            return False  # it is no checkpoint

    def _whole_beside(self, root: Root, found: NamedCheckpoint, names: Sequence[str]) -> NamedCheckpoint | None:
        """Return the file that is loaded instead of an index whose shards are all gone; None: there is none.

        Other writers leave the index when they replace a checkpoint in shards by a single file.
        """
        for name in dict.fromkeys([found.whole, *found.beside((), names)[0]]):
            if FileName(name).shard is None and _exists(root, name):
                self.warn(found.warning_of_gone_shards(root.path, name))
                return NamedCheckpoint(None, (name,), name)
        return None

    def _are_gone(self, root: Root, found: NamedCheckpoint, text: bytes, names: Sequence[str]) -> bool:
        """Return whether an index, chosen among these names, has no shard that exists."""
        if found.index is None or not names:
            return False
        index = parse_index(text, path=os.path.join(root.path, found.index), limits=self.limits)
        return not any(shard in names or _exists(root, shard) for shard in index.shards)

    def _index_text(self, root: Root, name: str, named: bool) -> bytes:
        message = f"the index is larger than the limit `header_bytes`{advice_on_limit('header_bytes')}"
        with closing(root.open(name, trusted=named)) as file:
            return _read_whole(file, self.limits.header_bytes, message)

    def _shards(
        self, path: str, openers: Mapping[str, Callable[[], Source]], index: ShardIndex | None
    ) -> OpenCheckpoint:
        """Open all files, then read and check all headers; or one file after the other, if they are too many."""
        try:
            return self._shards_by(path, openers, index, in_turns=len(openers) > max_open_files())
        except StorageError as error:
            if error.errno not in _TOO_MANY or len(openers) == 1:
                raise
        return self._shards_by(path, openers, index, in_turns=True)  # the process has many other files open

    def _shards_by(
        self, path: str, openers: Mapping[str, Callable[[], Source]], index: ShardIndex | None, *, in_turns: bool
    ) -> OpenCheckpoint:
        files: list[Source] = []
        headers: list[Header] = []
        num_replaced = 0
        try:
            for name, open_one in openers.items():
                self.check()
                files.append(_shard(open_one, index))
                if isinstance(files[-1], RequestedSource):  # it has no descriptor; a file in its place has one
                    in_turns = False
                    if num_replaced < max_open_files():
                        files[-1] = self.replacement(files[-1])
                        num_replaced += not isinstance(files[-1], RequestedSource)
                if in_turns:
                    headers.append(self._header(files[-1], name))
                    files[-1].close()
            for name, file in zip(openers, files, strict=True) if not in_turns else ():
                self.check()
                headers.append(self._header(file, name))
            headers, warnings = check_shards(index, headers, strict=self.strict, path=path)
            for warning in warnings:
                self.warn(warning)
            described: list[Mapping[str, Any]] = [header.metadata for header in headers]
            differing = frozenset(_differing(described))
            if index is not None:
                described.append(index.metadata)
                differing -= index.metadata.keys()  # whose value is that of the checkpoint
            metadata = {key: _as_text(key, value) for one in described for key, value in one.items()}
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
        return OpenCheckpoint(path, files, headers, metadata, aliases, openers=again, differing_metadata=differing)

    def _header(self, file: Source, shard: str, *, is_loaded: bool = True) -> Header:
        """Read and parse one header; a small one comes with its length in a single read."""
        file_bytes = file.identity.nbytes
        head = read_bytes(file, 0, min(file_bytes, _FIRST_READ_BYTES))
        try:
            nbytes = header_nbytes(head[:PREFIX_BYTES], file_bytes=file_bytes, limits=self.limits, path=file.path)
        except FormatError as error:
            kind = _kind_of(file)
            if kind is None or kind.is_safetensors:
                raise
            raise FormatError(kind.refusal(file.path), path=file.path) from error
        end = PREFIX_BYTES + nbytes
        raw = head[PREFIX_BYTES:end] if end <= len(head) else read_bytes(file, PREFIX_BYTES, nbytes)
        with collection_paused(nbytes // _ENTRY_BYTES):
            header = parse_header(
                raw,
                file_bytes=file_bytes,
                path=file.path,
                shard=shard,
                limits=self.limits,
                allow_trailing=self.allow_trailing,
            )
        if is_loaded and (trailing := file_bytes - header.data_start - header.data_bytes):
            self.warn(f"{printable(file.path)}: {trailing:,} bytes after the last tensor are left out")
        return header


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
        return _read_whole(file, Manifest.MAX_BYTES, "the manifest is too long")


def _chosen(root: Root) -> tuple[Sequence[str], NamedCheckpoint]:
    """Return the names in a directory, and the checkpoint among them; see `stio.format.files.directory`."""
    if isinstance(root, SingleFileRoot):
        return [], NamedCheckpoint(None, (root.name,), root.name)
    names = root.listdir()
    return names, choose(names, path=root.path, kind_of=partial(_kind_of_name, root))


def _link(url: str) -> tuple[Root, str] | None:
    """Return the place and the name of a file whose URL does not end in its name; None: its content is none of a file.

    A web page is none: servers show a directory, or an error, as one.
    """
    if url.partition("?")[0].endswith("/"):
        return None
    root, name = open_url(url, is_file=True)
    kind = _kind_at(root, name) if name else None
    return None if kind is None or kind.is_page else (root, name)


def _exists(root: Root, name: str) -> bool:
    try:
        root.open(name).close()
    except CheckpointNotFoundError:
        return False
    return True


def _kind_of(file: Source) -> FileKind | None:
    return kind_of(lambda begin, end: read_bytes(file, begin, end - begin), file.identity.nbytes, file.path)


def _kind_of_name(root: Root, name: str) -> FileKind | None:
    with suppress(StioError):
        return _kind_at(root, name)
    return None


def _kind_at(root: Root, name: str) -> FileKind | None:
    with closing(root.open(name)) as file:
        return _kind_of(file)


def _advise(error: StioError, advice: str) -> None:
    """Add a clause to the message of an error that is raised again."""
    error.message += advice
    error.args = (error.message,)


def _differing(described: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the keys that have several values."""
    first: dict[str, Any] = {}
    for one in described:
        for key, value in one.items():
            if first.setdefault(key, value) != value:
                yield key


def _as_text(key: str, value: object) -> object:
    """Return a value of the metadata as text: an index may have any JSON there. Counts of the tensors stay numbers."""
    if isinstance(value, str) or key in ("total_size", "total_parameters"):
        return value
    return json.dumps(value, ensure_ascii=False)


def _shard(open_one: Callable[[], Source], index: ShardIndex | None) -> Source:
    try:
        return open_one()
    except CheckpointNotFoundError as error:
        if index is None:
            raise
        message = "the index names a shard that does not exist; the download may be incomplete"
        raise CheckpointNotFoundError(message + broken_link(error.path or ""), path=error.path) from None


def _read_whole(file: Source, max_bytes: int, message: str) -> bytes:
    """Return the content of a file, unless it is too long."""
    nbytes = file.identity.nbytes
    if nbytes > max_bytes:
        raise LimitError(message, path=file.path, expected=f"at most {max_bytes:,} bytes", found=nbytes)
    return read_bytes(file, 0, nbytes)


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
                f"{ALIASES_KEY} must lead from names without data to names of tensors; if a program has copied it from "
                "other tensors, save without it: safetensors.torch.save_file(load_file(FILE), NEW)",
                path=path,
                found=f"{printable(alias)!r}: {printable(target)!r}",
            )
    return {alias: target for alias, target in aliases.items() if target in known} if elsewhere else aliases
