"""Finds the checkpoint that a source names, and opens its shards (`shards.py`).

The source is a file, a directory with an index or with one file, an index, a URL of one of these, or a `Root`. All
shards are opened through one directory. If a save replaces the checkpoint meanwhile, the new one is opened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from stio.errors import (
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    LimitError,
    StioError,
    StorageError,
    listed,
)
from stio.format.delta import DELTA_KEY
from stio.format.files import (
    MANIFEST_SUFFIX,
    FileKind,
    FileName,
    Manifest,
    NamedCheckpoint,
    advice_for_missing,
    choose,
    parse_index,
    require_one_set,
)
from stio.limits import advice_on_limit
from stio.storage.base import ParallelRoot, Root, RootInTree, Source, read_bytes
from stio.storage.checkpoint.chain import description_of, is_delta, join, local_base
from stio.storage.checkpoint.shards import (
    ManifestText,
    OpenCheckpoint,
    OpenOptions,
    kind_of_file,
    open_shards,
    read_header,
)
from stio.storage.checks import advice_for_hub_cache, commits_in
from stio.storage.local import LocalRoot
from stio.storage.open import SingleFileRoot, is_hub, open_directory, open_file, open_url
from stio.text import is_url, without_secrets

_MAX_EXAMINED = 8
"""Files beside an index whose headers are read: a directory may hold thousands, such as adapters."""

_MODELS = ("model", "pytorch_model", "diffusion_pytorch_model")
_PICKLED_MODEL = ("pytorch_model.bin", "pytorch_model-", "diffusion_pytorch_model.bin", "diffusion_pytorch_model-")
"""Beginnings of the names of whole models in files of `torch.save`; the other names are those of their safetensors."""

SourceLike: TypeAlias = str | os.PathLike[str] | Root
"""A `.safetensors` file, an index, a directory, a URL of one of these, or a root of your own."""

_DEFAULT = OpenOptions()


def open_checkpoint(source: SourceLike, options: OpenOptions = _DEFAULT) -> OpenCheckpoint:
    """Open a checkpoint; blocks.

    Args:
        source: A `.safetensors` file, an index, a directory, a URL of one of these, or a `Root`.
        options: How it is opened.

    Raises:
        CheckpointNotFoundError: There is no file at this path, or no checkpoint in the directory.
        AmbiguousCheckpointError: A directory has several candidates and no index.
        FormatError: A header is wrong.
        IndexFormatError: The index is wrong, or does not fit the shards.
        UnsafePathError: The index, or the base of a delta, leads out of the directory.
        MismatchError: The base of a delta was replaced.
        StorageError: The operating system reported an error.
    """
    opened = _Opening(options).open(source)
    if not options.joins or not is_delta(opened):
        return opened
    alone = replace(options, joins=False, examine_others=False, shards_of=lambda index: None)
    root = source if isinstance(source, Root) else None
    return join(opened, options, partial(_Opening(alone).open_base, root))


def base_of(path: str) -> str | None:
    """Return the path of the base of a local delta; None if it is a full checkpoint, or cannot be read; blocks.

    Raises:
        StorageError: The operating system reported an error.
    """
    options = OpenOptions(joins=False, warn=lambda _: None)
    try:
        with closing(open_checkpoint(path, options)) as opened:
            if not is_delta(opened):
                return None
            delta = description_of(opened, options)
            return local_base(opened.path, delta.base, delta.is_directory, options.follow_symlinks)
    except StorageError:
        raise
    except StioError:
        return None


@dataclass(frozen=True, slots=True)
class _Opening:
    """One call of `open_checkpoint`."""

    options: OpenOptions

    def open(self, source: SourceLike) -> OpenCheckpoint:
        if not isinstance(source, str | bytes | os.PathLike):
            if isinstance(source, Root):
                return self._in_root(source, None)
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

    def open_base(self, root: Root | None, delta: OpenCheckpoint, base: str, in_parent: bool) -> OpenCheckpoint:
        """Open what a delta is based on.

        Args:
            root: The caller's own, if it did not pass a path or a URL.
            delta: The files of the delta.
            base: Path of the base.
            in_parent: It is relative to the parent of the directory with the delta, not to that directory.
        """
        place = delta.root or root
        if isinstance(place, SingleFileRoot):
            place = place.directory
        if not isinstance(place, RootInTree):
            if place is not None and not isinstance(place, LocalRoot):
                message = "nothing beside this storage can be opened, so a delta in it has no base; load it by its path"
                raise StorageError(message, path=delta.path, errno=errno.EOPNOTSUPP)
            return self.open(local_base(delta.path, base, in_parent, self.options.follow_symlinks))
        folder, _, name = base.rpartition("/")
        if not (FileName(name).is_checkpoint or FileName(name).is_index):
            folder, name = base, ""
        return self._named_at(place.at(folder, up=int(in_parent)), name)

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
                opening = _Opening(replace(self.options, with_manifest=False))
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
        shards = partial(open_shards, path, {os.path.basename(path): partial(open_file, path)}, None, self.options)
        if not self.options.with_manifest:
            return shards()
        # A save follows a link to its target, and writes the manifest beside that, with the target's name.
        beside = os.path.islink(path) and not os.path.lexists(path + MANIFEST_SUFFIX)
        folder, name = os.path.split(os.path.realpath(path) if beside else path)
        with open_directory(folder or ".", follow_symlinks=self.options.follow_symlinks) as root:
            opened = _with_manifest(root, name, shards)
        if opened.manifest is not None:
            opened.manifest = replace(opened.manifest, names=(name,))
        return opened

    def _in_directory(self, path: str, index_name: str | None) -> OpenCheckpoint:
        root = open_directory(path, follow_symlinks=self.options.follow_symlinks)
        try:
            opened = self._in_root(root, index_name)
        except BaseException:
            root.close()
            raise
        if opened.openers:
            opened.root = root
        else:
            root.close()
        return opened

    def _in_root(self, root: Root, index_name: str | None) -> OpenCheckpoint:
        """Open the checkpoint of a directory; if a save replaces it after the listing, open the new one."""
        last: list[object] = []
        while True:
            self.options.check()
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
            whole_index = parse_index(text, path=os.path.join(root.path, found.index), limits=self.options.limits)
            if names and not whole_index.shards and (whole := self._whole_beside(root, found, names)):
                return self._named(root, whole, b"", names)
            index = whole_index
            is_whole = self.options.with_manifest or DELTA_KEY in index.metadata  # of a delta, all files are needed
            if not is_whole and (wanted := self.options.shards_of(index)) is not None:
                index = index.part(wanted)
            files = index.shards
        openers = {name: partial(root.open, name) for name in files}
        if not isinstance(root, LocalRoot) and isinstance(root, ParallelRoot):  # a check of a protocol takes 12 us
            root.open_ahead(files)
        shards = partial(open_shards, root.path, openers, index, self.options)
        opened = _with_manifest(root, found.whole, shards) if self.options.with_manifest else shards()
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
        loaded = found.index or found.whole
        if names == [loaded]:
            return
        same, others = found.beside(files, names)
        if self.options.examine_others and not is_hub(root.path):  # there it would be downloaded
            same += [name for name in others[:_MAX_EXAMINED] if self._has_names_of(root, name, opened)]
        if found.stem not in _MODELS:  # such as an adapter
            same += [name for name in names if name.startswith(_PICKLED_MODEL)]
        if same:
            self.options.warn(found.warning_of_others(root.path, same))

    def _has_names_of(self, root: Root, name: str, opened: OpenCheckpoint) -> bool:
        """Return whether a file has tensors with names that the checkpoint has."""
        try:
            with closing(root.open(name)) as file:
                found = read_header(file, name, self.options, is_loaded=False).names
                return any(name in opened.index_names or any(name in one for one in opened.headers) for name in found)
        except StioError:
            return False  # it is no checkpoint

    def _whole_beside(self, root: Root, found: NamedCheckpoint, names: Sequence[str]) -> NamedCheckpoint | None:
        """Return the file that is loaded instead of an index whose shards are all gone; None: there is none.

        Other writers leave the index when they replace a checkpoint in shards by a single file.
        """
        for name in dict.fromkeys([found.whole, *found.beside((), names)[0]]):
            if FileName(name).shard is None and _exists(root, name):
                self.options.warn(found.warning_of_gone_shards(root.path, name))
                return NamedCheckpoint(None, (name,), name)
        return None

    def _are_gone(self, root: Root, found: NamedCheckpoint, text: bytes, names: Sequence[str]) -> bool:
        """Return whether an index, chosen among these names, has no shard that exists."""
        if found.index is None or not names:
            return False
        index = parse_index(text, path=os.path.join(root.path, found.index), limits=self.options.limits)
        return not any(shard in names or _exists(root, shard) for shard in index.shards)

    def _index_text(self, root: Root, name: str, named: bool) -> bytes:
        message = f"the index is larger than the limit `header_bytes`{advice_on_limit('header_bytes')}"
        with closing(root.open(name, trusted=named)) as file:
            return _read_whole(file, self.options.limits.header_bytes, message)


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


def _kind_of_name(root: Root, name: str) -> FileKind | None:
    with suppress(StioError):
        return _kind_at(root, name)
    return None


def _kind_at(root: Root, name: str) -> FileKind | None:
    with closing(root.open(name)) as file:
        return kind_of_file(file)


def _advise(error: StioError, advice: str) -> None:
    """Add a clause to the message of an error that is raised again."""
    error.message += advice
    error.args = (error.message,)


def _read_whole(file: Source, max_bytes: int, message: str) -> bytes:
    """Return the content of a file, unless it is too long."""
    nbytes = file.identity.nbytes
    if nbytes > max_bytes:
        raise LimitError(message, path=file.path, expected=f"at most {max_bytes:,} bytes", found=nbytes)
    return read_bytes(file, 0, nbytes)
