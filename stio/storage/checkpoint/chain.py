"""A delta and what it is based on, opened as one checkpoint.

`join` opens the base of a delta beside it, which may be a delta too, and makes one `OpenCheckpoint` of all: each tensor
is in one header, that of the file that holds it whole, and `patches` has the elements that were changed since. Ids and
paths are checked before any tensor is read. Whoever reads a tensor applies its patches to what was read
(`apply_changes`), before any selection or cast.

`read_update` reads what a chain changes behind one of its links. The files are compared with the manifests of their
links, and all positions are checked, so that a damaged delta is an error before anything is changed by it.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from stio.errors import CheckpointNotFoundError, FormatError, MismatchError, printable
from stio.format import TensorInfo
from stio.format.delta import (
    DELTA_KEY,
    DELTA_POINTER,
    DELTA_TENSOR,
    FORMAT,
    ID_KEY,
    Delta,
    FileRange,
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
from stio.storage.checkpoint.integrity import PIECE_BYTES, read_manifest, require_digest
from stio.storage.checkpoint.shards import OpenCheckpoint, OpenOptions
from stio.storage.checks import require_inside
from stio.storage.open import max_open_files, open_file
from stio.text import is_url, without_secrets

_OF_A_FULL_ONE = ("format", "total_size", "total_parameters")
"""Metadata that describe a checkpoint's own files: those of a delta's base describe the whole."""


Update: TypeAlias = tuple[dict[str, Region], dict[str, list[Changes]]]
"""By name, the bytes of tensors that are new as a whole, and the changed elements of others, the oldest first."""

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
    chain = [opened]
    with ExitStack() as undo:
        undo.callback(opened.close)
        while is_delta(last := chain[-1]):
            options.check()
            last.delta = delta = description_of(last, options)
            if len(chain) > 1 and (depth := _depth_of(chain[-2]) - 1) != delta.depth:
                message = "the depths of this delta and of the one that is based on it do not follow on one another"
                raise FormatError(message, path=last.path, expected=depth, found=delta.depth)
            try:
                base = open_base(last, delta.base, delta.is_directory)
            except CheckpointNotFoundError as error:
                place = printable(without_secrets(error.path or delta.base))
                message = f"the base of this delta is missing: {place}, with the id {delta.base_id}"
                raise CheckpointNotFoundError(message, path=last.path) from error
            undo.callback(base.close)
            _require_id(last, base, delta, options)
            chain.append(base)
            _keep_few_open(chain)
        if (depth := _depth_of(chain[-2])) != 1:
            message = "the chain of deltas is shorter than its deltas say"
            raise FormatError(message, path=chain[-2].path, expected=f"a delta of depth {depth - 1} as base")
        joined = _joined(chain[::-1])
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
        raw = _read_range(opened, _range_of(opened, info)).tobytes()
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
    return ids | {opened.id}


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
    memory = allocate(PIECE_BYTES)
    for shard in sorted(range(len(opened.files)), key=lambda k: opened.headers[k].shard):
        with ExitStack() as owned:
            file = opened.open_files([shard], owned)[shard]
            digest = digest_of_source(file, new_hasher(algorithm), memory, lambda _: check())
        whole.update(memoryview(digest.encode()))
    return whole.hexdigest()


def _joined(links: Sequence[OpenCheckpoint]) -> OpenCheckpoint:
    """Return the checkpoint of a chain, of which the first link is the full one."""
    full, last = links[0], links[-1]
    described = full.dtypes_and_shapes()
    headers, patches, openers = [*full.headers], dict[str, tuple[Patch, ...]](), list[Callable[[], Source]]()
    for base, one in pairwise(links):
        assert one.delta is not None
        own = patches_of(one.delta, one.headers, first=len(headers), path=one.path)
        changed = {tensor.name: (tensor.dtype, tensor.shape) for tensor in one.delta.changed}
        whole = {name: found for name, found in one.dtypes_and_shapes().items() if not is_own_name(name)}
        for name, found in [*changed.items(), *whole.items()]:
            if described.get(name) != found or (name in changed and name in whole):
                message = f"tensor {printable(name)!r} of the delta does not fit its base"
                raise FormatError(message, path=one.path, expected=str(described.get(name)), found=str(found))
        if not one.aliases.items() <= full.aliases.items():
            raise FormatError("the aliases of the delta are not those of its base", path=one.path)
        patches = {name: them for name, them in patches.items() if name not in whole}
        for name, patch in own.items():
            patches[name] = (*patches.get(name, ()), patch)
        place = partial(_beside, one.delta, _is_file(one.delta, base))
        headers = [
            replace(header.without(whole.keys() & {*header.names}), shard=place(header.shard)) for header in headers
        ]
        headers += [header.without({name for name in header.names if is_own_name(name)}) for header in one.headers]
    if any(link.openers for link in links):
        for link in links:
            openers += link.openers or [partial(open_file, os.path.abspath(file.path)) for file in link.files]
    metadata = {key: value for key, value in last.metadata.items() if key not in (DELTA_KEY, *_OF_A_FULL_ONE)}
    return replace(
        last,
        files=[file for link in links for file in link.files],
        headers=headers,
        metadata={key: full.metadata[key] for key in _OF_A_FULL_ONE if key in full.metadata} | metadata,
        aliases=full.aliases,
        differing_metadata=last.differing_metadata - {DELTA_KEY},
        openers=openers,
        patches=patches,
        links=tuple(links),
    )


def _is_file(delta: Delta, base: OpenCheckpoint) -> bool:
    """Return whether a base is named by a file or an index, and not by its directory."""
    return posixpath.basename(delta.base) in (base.index, *(header.shard for header in base.headers[-1:]))


def _beside(delta: Delta, is_file: bool, shard: str) -> str:
    """Return the name of a file of the base, and of its own bases, relative to the delta."""
    folder = posixpath.dirname(delta.base) if is_file else delta.base
    return posixpath.normpath(posixpath.join(".." if delta.is_directory else "", folder, shard))


def _depth_of(link: OpenCheckpoint) -> int:
    return link.delta.depth if link.delta else 0


def wrong_changes(opened: OpenCheckpoint, check: Callable[[], None]) -> Iterator[tuple[int, FormatError]]:
    """Yield each file of a chain with positions that are malformed, and the error; reads all changed elements."""
    for name, patches in opened.patches.items():
        for patch in patches:
            check()
            try:
                apply_changes([changes_of(opened, patch)], opened.info(name).nbytes // patch.item_bytes, [])
            except FormatError as error:
                yield patch.codes.shard, error


def _range_of(opened: OpenCheckpoint, info: TensorInfo) -> FileRange:
    shard = next(shard for shard, header in enumerate(opened.headers) if info.name in header)
    return FileRange(shard, info.file_offset, info.nbytes)


def _read_range(opened: OpenCheckpoint, part: FileRange) -> Region:
    """Read a range of a file into memory of its own; blocks."""
    if not part.nbytes:
        return Region(0, 0)
    region = allocate(part.nbytes).sub(0, part.nbytes)
    with ExitStack() as owned:
        opened.open_files([part.shard], owned)[part.shard].read_into(part.offset, [region])
    return region


def changes_of(opened: OpenCheckpoint, patch: Patch, read: Callable[[FileRange], Region] | None = None) -> Changes:
    """Return the changed elements of one tensor in one delta; blocks.

    Args:
        opened: The chain.
        patch: Where they are.
        read: Returns a range that is in memory already; None: they are read.
    """
    codes, values = map(read or partial(_read_range, opened), (patch.codes, patch.values))
    path = opened.files[patch.codes.shard].path
    return Changes(codes, patch.code_bytes, values, patch.count, patch.item_bytes, path)


def read_tensor(opened: OpenCheckpoint, info: TensorInfo) -> Region:
    """Read a whole tensor into host memory of its own, its changed elements applied; blocks.

    For small tensors and where speed does not matter; loads do it group by group.
    """
    region = _read_range(opened, _range_of(opened, info))
    if patches := opened.patches.get(info.name):
        num_elements = info.nbytes // patches[0].item_bytes
        apply_changes(
            [changes_of(opened, patch) for patch in patches], num_elements, [(0, num_elements, region.address)]
        )
    return region


def read_update(
    opened: OpenCheckpoint, held: str, *, budget_bytes: int | None, check: Callable[[], None] = lambda: None
) -> Update | None:
    """Read what was changed since a version, and check it; blocks.

    Args:
        opened: The newer version, opened `with_manifest`. Files of links without a manifest are not compared with one.
        held: Id of the version.
        budget_bytes: Most bytes of the deltas behind it; None: no limit.
        check: Called between pieces; may raise to end the call.

    Returns:
        The update. None: the chain of the newer version does not have the version, or the deltas are too large.

    Raises:
        IntegrityError: A file of a delta differs from its manifest.
        FormatError: Positions are malformed.
        StioError: A file could not be read, or was changed meanwhile.
    """
    ids = [link.id for link in opened.links]
    if not held or held not in ids:
        return None
    newer = opened.apart()[ids.index(held) + 1 :]
    nbytes = sum(file.identity.nbytes for part in newer for file in part.files)
    if budget_bytes is not None and nbytes > budget_bytes:
        return None
    read = [image for part in newer for image in _read(part, check)]
    images = dict(enumerate(read, len(opened.files) - len(read)))
    whole: dict[str, Region] = {}
    changed: dict[str, list[Changes]] = {}
    for shard, image in images.items():
        for name in opened.headers[shard].names:
            info = opened.headers[shard].info(name)
            whole[name] = image.sub(info.file_offset, info.nbytes) if info.nbytes else Region(0, 0)
    in_memory = partial(_in, images)
    for name, patches in opened.patches.items():
        if changes := [changes_of(opened, patch, in_memory) for patch in patches if patch.codes.shard in images]:
            check()
            num_elements = opened.info(name).nbytes // changes[0].item_bytes
            target = [(0, num_elements, whole[name].address)] if name in whole else []
            apply_changes(changes, num_elements, target)  # without a target it only checks
            if name not in whole:
                changed[name] = changes
    return whole, changed


def _in(images: Mapping[int, Region], part: FileRange) -> Region:
    return images[part.shard].sub(part.offset, part.nbytes)


def _read(part: OpenCheckpoint, check: Callable[[], None]) -> list[Region]:
    """Read the files of one delta into memory, and compare them with its manifest if it has one."""
    manifest = read_manifest(part) if part.manifest is not None and part.manifest.texts else None
    images = list[Region]()
    with ExitStack() as owned:
        for k, file in enumerate(part.open_files(range(len(part.files)), owned)):
            hasher = None if manifest is None else new_hasher(manifest.algorithm)
            nbytes = file.identity.nbytes
            images.append(image := allocate(nbytes).sub(0, nbytes))
            for offset in range(0, nbytes, PIECE_BYTES):
                check()
                piece = image.sub(offset, min(PIECE_BYTES, nbytes - offset))
                file.read_into(offset, [piece])
                if hasher is not None:
                    hasher.update(piece.view())
            file.check_unchanged()
            if hasher is not None and manifest is not None and part.manifest is not None:
                require_digest(file, hasher.hexdigest(), part.manifest.names[k], manifest)
    return images
