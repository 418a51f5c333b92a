"""`stio gc PATH`: completes or rolls back saves whose process died, and removes their files. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import click

from stio.cli.output import JSON_OPTION, NO, PATH, ZERO_OR_MORE, print_result, wrong_arguments
from stio.errors import one_line
from stio.storage import open_destination
from stio.storage.commit import MAX_AGE_SECONDS, GarbageReport, collect_garbage
from stio.text import is_url, without_secrets

_NO_DESTINATION = "there is no such destination, and no save to it was interrupted; check the path"


@click.command()
@click.argument("path", type=PATH)
@click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@click.option(
    "--max-age",
    "max_age_hours",
    metavar="HOURS",
    type=ZERO_OR_MORE,
    default=MAX_AGE_SECONDS / 3600,
    show_default=True,
    help="On NFS, FUSE and stores: skip what is younger than this.",
)
@JSON_OPTION
def gc(path: str, dry_run: bool, max_age_hours: float) -> int:
    """Clean up after saves whose process died.

    PATH is the destination of those saves: a path, or a URL of s3, gs or az. A save that had published its checkpoint
    is completed, any other is rolled back. Saves under way are left alone. Each save also cleans up its own destination
    on this machine, so this command is for stores, and for destinations without further saves. If there is no
    such destination yet, there is nothing to do; its directory must exist. Exit status 1: something cannot be removed.
    """
    max_age_seconds = max_age_hours * 3600
    if is_url(path):
        with wrong_arguments():  # a URL that nothing can be saved to
            destination = open_destination(path)
        report: GarbageReport = destination.collect_unused(max_age_seconds=max_age_seconds, dry_run=dry_run)
    else:
        report = collect_garbage(path, max_age_seconds=max_age_seconds, dry_run=dry_run)
    path = without_secrets(path)
    result = {"path": path, "dry_run": dry_run, **dataclasses.asdict(report)}
    print_result(result, lambda: _lines(path, report, dry_run))
    return NO if report.failed else 0


_DONE = {
    "finished": "completed, its checkpoint is published",
    "undone": "rolled back, its checkpoint was not published",
    "removed": "removed, an earlier cleanup was interrupted",
    "unused": "deleted, no index names it",
    "aborted": "aborted, its upload was not completed",
}
"""What is done to the directories and files of a field of `GarbageReport`."""

_LEFT = {
    "newer": "another version of stio made it; run `stio gc` of that version",
    "failed": "the system does not let this process remove it",
    "kept": "its process runs or may run, or it cannot be removed",
}
_KEPT_IN_STORE = "no index names it, but it is younger than --max-age, and its save may be under way"


def _lines(path: str, report: GarbageReport, dry_run: bool) -> Iterator[str]:
    would = "would be " if dry_run else ""
    left = _LEFT | ({"kept": _KEPT_IN_STORE} if is_url(path) else {})
    texts = {**{k: would + text for k, text in _DONE.items()}, **{k: f"left alone, {why}" for k, why in left.items()}}
    for k, text in texts.items():
        told = {*report.newer, *report.failed} if k == "kept" else ()
        yield from (f"{one_line(name)}: {text}" for name in getattr(report, k) if name not in told)
    if report == GarbageReport():
        exists = is_url(path) or os.path.lexists(path)
        yield f"{one_line(path)}: {'no save was interrupted here' if exists else _NO_DESTINATION}"
