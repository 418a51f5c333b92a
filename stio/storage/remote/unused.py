"""What interrupted saves have left in a store: shards that no index names, and uploads that were not completed.

obstore lists no uploads. Those of S3 are listed and aborted by requests of this module's own, which obstore signs.
Azure deletes the blocks of uploads itself after a week; other stores need a rule (`AbortIncompleteMultipartUpload`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from stio.errors import CheckpointNotFoundError, IndexFormatError, StorageError
from stio.format.index import parse_index
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX, is_of_save
from stio.runtime.log import log
from stio.storage.commit.recovery import GarbageReport
from stio.storage.remote.folder import Folder
from stio.storage.remote.one_request import ask
from stio.storage.remote.stores import Query, signed_url

_MOST_ANSWER_BYTES = 16 << 20
"""Longest answer that is read; a page of the list has at most 1,000 uploads."""


def collect_unused(folder: Folder, name: str, *, max_age_seconds: float, dry_run: bool) -> GarbageReport:
    """Delete the shards of saves that did not commit, and abort their uploads.

    Args:
        folder: The directory.
        name: Name of the only file, whose uploads count too; "": the checkpoint is a directory.
        max_age_seconds: What is younger stays: no lock shows whether its save is under way.
        dry_run: Change nothing.

    Raises:
        StioError: The store cannot be read, or refuses to delete.
    """
    objects = folder.list()
    used: set[str] = set()
    for index in objects:
        if index.endswith(INDEX_SUFFIX):
            used |= _shards_of(folder, index)
    now = time.time()
    ages = {one: now - listed.changed for one, listed in objects.items() if is_of_save(one) and one not in used}
    old = sorted(one for one, age in ages.items() if age >= max_age_seconds)
    if not dry_run:
        folder.delete(old)
    uploads = [one for one in _uploads(folder) if is_of_save(one.name) or (name and one.name == name)]
    ended = [one for one in uploads if now - one.began >= max_age_seconds]
    if not dry_run:
        for one in ended:
            _send(folder, "DELETE", one.name, {"uploadId": one.id})
    kept = {*ages} - {*old} | {one.name for one in uploads if one not in ended}
    return GarbageReport(
        unused=tuple(f"{folder.path}/{one}" for one in old),
        aborted=tuple(f"{folder.path}/{one.name}" for one in ended),
        kept=tuple(f"{folder.path}/{one}" for one in sorted(kept)),
    )


def _shards_of(folder: Folder, index: str) -> set[str]:
    found = folder.read(index)
    try:
        return set() if found is None else {*parse_index(found[0], path=f"{folder.path}/{index}").shards}
    except IndexFormatError:
        if index.endswith(FILE_SUFFIX + INDEX_SUFFIX):
            raise
        return set()  # it is of files of another kind


@dataclass(frozen=True, slots=True)
class _Unfinished:
    name: str
    id: str
    began: float


def _uploads(folder: Folder) -> list[_Unfinished]:
    """Return the uploads to objects of a directory that were neither completed nor aborted; [] if S3 does not say."""
    if folder.root.location.scheme != "s3":
        return []
    try:
        return sorted(_listed_uploads(folder), key=lambda one: (one.name, one.began))
    except StorageError as error:
        log(
            logging.WARNING,
            "the uploads that interrupted saves have left cannot be listed; a rule of the bucket ends them "
            "(AbortIncompleteMultipartUpload): %s",
            error,
        )
        return []


def _listed_uploads(folder: Folder) -> Iterator[_Unfinished]:
    prefix = folder.key("")
    query = {"uploads": "", "prefix": prefix}
    while True:
        before = dict(query)
        try:
            page = ElementTree.fromstring(_send(folder, "GET", "", query))
            for one in page.iterfind("{*}Upload"):
                name = one.findtext("{*}Key", "").removeprefix(prefix)
                if "/" not in name:
                    began = datetime.fromisoformat(one.findtext("{*}Initiated", ""))
                    yield _Unfinished(name, one.findtext("{*}UploadId", ""), began.timestamp())
        except (ElementTree.ParseError, ValueError) as error:  # ValueError: no time
            raise StorageError(f"the store did not send a list of uploads: {error}", path=folder.path) from None
        if page.findtext("{*}IsTruncated") != "true":
            return
        query["key-marker"] = page.findtext("{*}NextKeyMarker", "")
        query["upload-id-marker"] = page.findtext("{*}NextUploadIdMarker", "")
        if query == before:
            raise StorageError("the store sends the same page of its list of uploads again", path=folder.path)


def _send(folder: Folder, method: str, name: str, query: Query) -> bytes:
    """Send a request of S3 for an object, "": for the bucket, that obstore has no function for; return the answer."""
    root, key = folder.root, f"/{quote(folder.key(name))}" if name else ""

    def send(store: Any) -> bytes:
        url = signed_url(root.new_store, root.config, method, key, query)
        seconds = folder.patience.stall_seconds
        return ask(url, {}, _MOST_ANSWER_BYTES, stall_seconds=seconds, scheme="s3", method=method).body

    with suppress(CheckpointNotFoundError):  # it was completed or aborted by now
        return root.requester.run(send, f"{folder.path}/{name}" if name else folder.path, work="save")
    return b""
