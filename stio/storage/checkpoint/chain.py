"""A delta and what it is based on, opened as one checkpoint.

`join` opens the base of a delta beside it, which may be a delta too, and makes one `OpenCheckpoint` of all: each tensor
is in one header, that of the file that holds it whole, and `patches` has the elements that were changed since. Ids and
paths are checked before any tensor is read. Whoever reads a tensor applies its patches to what was read
(`apply_changes`), before any selection or cast.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from stio.errors import CheckpointNotFoundError, FormatError, MismatchError, printable
from stio.format import TensorInfo
from stio.format.delta import (
    DELTA_KEY,
    DELTA_POINTER,
    DELTA_TENSOR,
    FORMAT,
    ID_KEY,
    Delta,
    Patch,
    is_own_name,
    names_of,
    parse_delta,
    patches_of,
)
from stio.format.files import new_hasher
from stio.limits import limit_error
from stio.runtime.memory import Region, allocate
from stio.storage.base import Source, digest_of_source
from stio.storage.checkpoint.changes import Changes, apply_changes
from stio.storage.checkpoint.shards import Link, OpenCheckpoint, OpenOptions
from stio.storage.checks import require_inside
from stio.storage.open import max_open_files, open_file
from stio.text import is_url, without_secrets

_PIECE_BYTES = 16 << 20
_OF_A_FULL_ONE = ("format", "total_size", "total_parameters")
"""Metadata that describe a checkpoint's own files: those of a delta's base describe the whole."""


_digests: dict[tuple[object, ...], str] = {}
_MAX_DIGESTS = 64
"""Most bases without an id whose digests are known."""


def is_delta(opened: OpenCheckpoint) -> bool:
    """Return whether open files are those of a delta, even if another program has dropped its metadata."""
    if DELTA_KEY in opened.metadata or opened.metadata.get("format") == FORMAT:
        return True
    first = names_of(0)[0]
    return any(first in header.names for header in opened.headers)


def join(
    opened: OpenCheckpoint, options: OpenOptions, open_base: Callable[[OpenCheckpoint, str, bool], OpenCheckpoint]
) -> OpenCheckpoint:
    """Return a delta together with its base, as one checkpoint; after an error all files are closed.

    Args:
        opened: The files of the delta.
        options: How it was opened.
        open_base: Opens the files of a delta's base, without its own: takes the delta, the path of the base, and
            whether that is relative to the parent of the directory with the delta.

    Raises:
        CheckpointNotFoundError: A base is missing.
        MismatchError: It is another checkpoint than the delta was made from.
        FormatError: A delta is malformed, or does not fit its base.
        LimitError: The chain is too long.
        UnsafePathError: A base is a link to a place outside the directory that holds the delta.
    """
    chain, deltas = [opened], list[Delta]()
    with ExitStack() as undo:
        undo.callback(opened.close)
        while is_delta(last := chain[-1]):
            options.check()
            delta = description_of(last, options)
            if deltas and delta.depth != deltas[-1].depth - 1:
                message = "the depths of this delta and of the one that is based on it do not follow on one another"
                raise FormatError(message, path=last.path, expected=deltas[-1].depth - 1, found=delta.depth)
            try:
                base = open_base(last, delta.base, delta.is_directory)
            except CheckpointNotFoundError as error:
                place = printable(without_secrets(error.path or delta.base))
                message = f"the base of this delta is missing: {place}, with the id {delta.base_id}"
                raise CheckpointNotFoundError(message, path=last.path) from error
            undo.callback(base.close)
            _require_id(last, base, delta, options)
            chain.append(base)
            deltas.append(delta)
            _keep_few_open(chain)
        if deltas[-1].depth != 1:
            message = "the chain of deltas is shorter than its deltas say"
            raise FormatError(message, path=chain[-2].path, expected=f"a delta of depth {deltas[-1].depth - 1} as base")
        joined = chain.pop()
        while chain:
            joined = _joined(chain.pop(), joined, deltas.pop())
        undo.pop_all()
        return joined


def description_of(opened: OpenCheckpoint, options: OpenOptions) -> Delta:
    """Return the description of a delta whose files are open, without those of its base."""
    text = opened.metadata.get(DELTA_KEY)
    if not isinstance(text, str):
        message = (
            "this is a part of a delta, or a copy without its metadata: it has no description; open the delta's "
            "directory or index, or the checkpoint that it was copied from"
        )
        raise FormatError(message, path=opened.path, expected=f"metadata {DELTA_KEY}")
    if len(_ids(opened)) > 1:
        raise FormatError("the files of this delta are of different saves; save it again", path=opened.path)
    raw = text.encode(errors="replace")
    if text == DELTA_POINTER:
        if not any(DELTA_TENSOR in header for header in opened.headers):
            message = "the tensor with the description of the delta is missing"
            raise FormatError(message, path=opened.path, expected=DELTA_TENSOR)
        info, limit = opened.info(DELTA_TENSOR), options.limits.header_bytes
        if info.nbytes > limit:
            what = "the description of the delta is longer than"
            raise limit_error(what, "header_bytes", limit, path=opened.path, found=info.nbytes)
        raw = read_range(opened, _shard_of(opened, DELTA_TENSOR), info.file_offset, info.nbytes).tobytes()
    return parse_delta(raw, path=opened.path)


def local_base(path: str, base: str, in_parent: bool, follow_symlinks: bool) -> str:
    """Return the path of the base of a local delta, which may be a link such as `latest` to where it was saved.

    Args:
        path: A file of the delta, or its directory.
        base: Path of the base.
        in_parent: It is relative to the parent of the directory with the delta.
        follow_symlinks: It may be a link to any place.

    Raises:
        UnsafePathError: It is a link to a place outside that directory, and of no file in the same cache of the hub.
    """
    places = []
    for own in (os.path.realpath(path), os.path.abspath(path)):  # files in the hub's cache are links to elsewhere
        folder = own if os.path.isdir(own) else os.path.dirname(own)
        folder = os.path.realpath(os.path.dirname(folder) if in_parent else folder)
        places.append((os.path.join(folder, base), folder))
    found, folder = next((one for one in places if os.path.lexists(one[0])), places[0])
    if not follow_symlinks:
        require_inside(os.path.realpath(found), folder, found)
    return found


def _require_id(opened: OpenCheckpoint, base: OpenCheckpoint, delta: Delta, options: OpenOptions) -> None:
    algorithm = delta.base_id.rpartition(":")[0]
    ids = _ids(base) if not algorithm else {f"{algorithm}:{_known_digest_of(base, algorithm, options)}"}
    if ids == {delta.base_id}:
        return
    found = f"id {printable(' and '.join(sorted(ids - {''})))}" if ids - {""} else "no id"
    raise MismatchError(
        f"the base of this delta was replaced: {printable(without_secrets(base.path))} is not the checkpoint that it "
        "was made from, so the delta cannot be applied",
        path=opened.path,
        expected=f"id {delta.base_id}",
        found=f"{found}, not in all of its files" if len(ids) > 1 else found,
    )


def _ids(opened: OpenCheckpoint) -> set[str]:
    """Return the ids that the files of one checkpoint have, and its index; "" for one without."""
    ids = {header.metadata.get(ID_KEY, "") for header in opened.headers}
    return ids | {_id_of(opened)}


def _known_digest_of(base: OpenCheckpoint, algorithm: str, options: OpenOptions) -> str:
    """Return the digest of a base without an id, which this process reads once for each state of its files."""
    key = (algorithm, *((os.path.abspath(file.path), file.identity) for file in base.files))
    digest = _digests.get(key)
    if digest is None:
        digest = digest_of(base, algorithm, check=options.check)
        if len(_digests) >= _MAX_DIGESTS:
            _digests.clear()
        _digests[key] = digest
    return digest


def _keep_few_open(chain: Sequence[OpenCheckpoint]) -> None:
    """Close local files if there are too many, to open each again when it is read."""
    is_open = [one for one in chain if not (one.openers or one.root or any(is_url(file.path) for file in one.files))]
    if sum(len(one.files) for one in is_open) > max_open_files():
        for one in is_open:
            one.openers = [partial(open_file, os.path.abspath(file.path)) for file in one.files]
            for file in one.files:
                file.close()


def digest_of(opened: OpenCheckpoint, algorithm: str, *, check: Callable[[], None] = lambda: None) -> str:
    """Return the digest of all files of a checkpoint that has no id; it reads them, with calls of `check` between."""
    whole = new_hasher(algorithm)
    memory = allocate(_PIECE_BYTES)
    for shard in sorted(range(len(opened.files)), key=lambda k: opened.headers[k].shard):
        with ExitStack() as owned:
            file = opened.open_files([shard], owned)[shard]
            digest = digest_of_source(file, new_hasher(algorithm), memory, lambda _: check())
        whole.update(memoryview(digest.encode()))
    return whole.hexdigest()


def _joined(opened: OpenCheckpoint, base: OpenCheckpoint, delta: Delta) -> OpenCheckpoint:
    own = patches_of(delta, opened.headers, path=opened.path)
    described = base.dtypes_and_shapes()
    changed = {one.name: (one.dtype, one.shape) for one in delta.changed}
    whole = {name: one for name, one in opened.dtypes_and_shapes().items() if not is_own_name(name)}
    for name, one in [*changed.items(), *whole.items()]:
        if described.get(name) != one or (name in changed and name in whole):
            message = f"tensor {printable(name)!r} of the delta does not fit its base"
            raise FormatError(message, path=opened.path, expected=str(described.get(name)), found=str(one))
    if not opened.aliases.items() <= base.aliases.items():
        raise FormatError("the aliases of the delta are not those of its base", path=opened.path)
    first = len(base.files)
    patches = {name: them for name, them in base.patches.items() if name not in whole}
    for name, patch in own.items():
        moved = replace(patch, codes_shard=patch.codes_shard + first, values_shard=patch.values_shard + first)
        patches[name] = (*patches.get(name, ()), moved)
    link = Link(opened.path, _id_of(opened), delta, opened.manifest, tuple(header.shard for header in opened.headers))
    metadata = {key: value for key, value in opened.metadata.items() if key not in (DELTA_KEY, *_OF_A_FULL_ONE)}
    described_by_base = {key: base.metadata[key] for key in _OF_A_FULL_ONE if key in base.metadata}
    openers: list[Callable[[], Source]] = []
    if base.openers or opened.openers:
        openers = [*_openers_of(base), *_openers_of(opened)]
    return OpenCheckpoint(
        path=opened.path,
        files=[*base.files, *opened.files],
        headers=[
            *(
                replace(header.without(whole.keys() & set(header.names)), shard=_beside(delta, base, header.shard))
                for header in base.headers
            ),
            *(header.without({name for name in header.names if is_own_name(name)}) for header in opened.headers),
        ],
        metadata={**described_by_base, **metadata},
        aliases=base.aliases,
        index=opened.index,
        differing_metadata=opened.differing_metadata - {DELTA_KEY},
        manifest=opened.manifest,
        openers=openers,
        root=opened.root,
        patches=patches,
        links=(*(base.links or (_full_link(base),)), link),
        base=base,
    )


def _beside(delta: Delta, base: OpenCheckpoint, shard: str) -> str:
    """Return the name of a file of the base, and of its own bases, relative to the delta."""
    is_file = posixpath.basename(delta.base) in (base.index, *(header.shard for header in base.headers[-1:]))
    folder = posixpath.dirname(delta.base) if is_file else delta.base
    return posixpath.normpath(
        posixpath.join("..", folder, shard) if delta.is_directory else posixpath.join(folder, shard)
    )


def _full_link(base: OpenCheckpoint) -> Link:
    return Link(base.path, _id_of(base), None, base.manifest, tuple(header.shard for header in base.headers))


def _id_of(opened: OpenCheckpoint) -> str:
    found = opened.metadata.get(ID_KEY)
    return found if isinstance(found, str) else ""


def _openers_of(opened: OpenCheckpoint) -> list[Callable[[], Source]]:
    return list(opened.openers or [partial(open_file, os.path.abspath(file.path)) for file in opened.files])


def _shard_of(opened: OpenCheckpoint, name: str) -> int:
    return next(shard for shard, header in enumerate(opened.headers) if name in header)


def wrong_changes(opened: OpenCheckpoint, check: Callable[[], None]) -> Iterator[tuple[int, FormatError]]:
    """Yield each file of a chain with positions that are malformed, and the error; reads all changed elements."""
    for name, patches in opened.patches.items():
        num_elements = opened.info(name).nbytes // patches[0].item_bytes
        for patch in patches:
            check()
            try:
                apply_changes([changes_of(opened, patch)], num_elements, [])
            except FormatError as error:
                error.path = opened.files[patch.codes_shard].path
                yield patch.codes_shard, error


def read_range(opened: OpenCheckpoint, shard: int, offset: int, nbytes: int) -> Region:
    """Read a range of a file into memory of its own; blocks."""
    if not nbytes:
        return Region(0, 0)
    region = allocate(nbytes).sub(0, nbytes)
    with ExitStack() as owned:
        opened.open_files([shard], owned)[shard].read_into(offset, [region])
    return region


def changes_of(opened: OpenCheckpoint, patch: Patch) -> Changes:
    """Read the changed elements of one tensor in one delta; blocks."""
    codes = read_range(opened, patch.codes_shard, patch.codes_offset, patch.codes_nbytes)
    values = read_range(opened, patch.values_shard, patch.values_offset, patch.values_nbytes)
    return Changes(codes, patch.code_bytes, values, patch.count, patch.item_bytes)


def read_tensor(opened: OpenCheckpoint, info: TensorInfo) -> Region:
    """Read a whole tensor into host memory of its own, its changed elements applied; blocks.

    For small tensors and where speed does not matter; loads do it group by group.
    """
    region = read_range(opened, _shard_of(opened, info.name), info.file_offset, info.nbytes)
    if patches := opened.patches.get(info.name):
        item_bytes = patches[0].item_bytes
        num_elements = info.nbytes // item_bytes
        changes = [changes_of(opened, patch) for patch in patches]
        apply_changes(changes, num_elements, [(0, num_elements, region.address)])
    return region
