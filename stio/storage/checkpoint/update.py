"""What a chain of deltas changes behind one of its links: read into host memory, and checked.

The files are compared with the manifests of their links, and all positions are checked, so that a damaged delta is an
error before anything is changed by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeAlias

from stio.format.delta import Patch
from stio.format.files import new_hasher
from stio.runtime.memory import Region, allocate
from stio.storage.base import Source
from stio.storage.checkpoint.changes import Changes, apply_changes
from stio.storage.checkpoint.integrity import PIECE_BYTES, read_manifest, require_digest
from stio.storage.checkpoint.shards import Link, OpenCheckpoint

Update: TypeAlias = tuple[dict[str, Region], dict[str, list[Changes]]]
"""By name, the bytes of tensors that are new as a whole, and the changed elements of others, the oldest first."""


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
    num_held = ids.index(held) + 1
    first = sum(len(link.files) for link in opened.links[:num_held])
    if budget_bytes is not None and sum(file.identity.nbytes for file in opened.files[first:]) > budget_bytes:
        return None
    images: dict[int, Region] = {}
    with ExitStack() as owned:
        files = opened.open_files(range(first, len(opened.files)), owned)
        for link in opened.links[num_held:]:
            begin = first + len(images)
            read = _read_link(opened, link, files[begin : begin + len(link.files)], check)
            images |= enumerate(read, begin)
    whole: dict[str, Region] = {}
    changed: dict[str, list[Changes]] = {}
    for shard, image in images.items():
        for name in opened.headers[shard].names:
            info = opened.headers[shard].info(name)
            whole[name] = image.sub(info.file_offset, info.nbytes) if info.nbytes else Region(0, 0)
    for name, patches in opened.patches.items():
        if changes := [_changes(images, patch) for patch in patches if patch.codes_shard in images]:
            check()
            num_elements = opened.info(name).nbytes // changes[0].item_bytes
            target = [(0, num_elements, whole[name].address)] if name in whole else []
            apply_changes(changes, num_elements, target)  # without a target it only checks
            if name not in whole:
                changed[name] = changes
    return whole, changed


def _read_link(opened: OpenCheckpoint, link: Link, files: Sequence[Source], check: Callable[[], None]) -> list[Region]:
    """Read the files of one link into memory, and compare them with its manifest if it has one."""
    names, manifest = link.files, None
    if link.manifest is not None and link.manifest.texts:
        names, manifest = link.manifest.names, read_manifest(replace(opened, files=[*files], manifest=link.manifest))
    images = []
    for name, file in zip(names, files, strict=True):
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
        if manifest is not None and hasher is not None:
            require_digest(file, hasher.hexdigest(), name, manifest)
    return images


def _changes(images: Mapping[int, Region], patch: Patch) -> Changes:
    codes = images[patch.codes_shard].sub(patch.codes_offset, patch.codes_nbytes)
    values = images[patch.values_shard].sub(patch.values_offset, patch.values_nbytes)
    return Changes(codes, patch.code_bytes, values, patch.count, patch.item_bytes)
