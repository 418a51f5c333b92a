"""`stio gc PATH`: completes or rolls back saves whose process died, and removes their files. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import click

from stio.cli.output import JSON_OPTION, NO, PATH, ZERO_OR_MORE, print_result, wrong_arguments
from stio.errors import one_line
from stio.runtime.text import is_url, without_secrets
from stio.storage.commit.recovery import MAX_AGE_SECONDS, GarbageReport, collect_garbage
from stio.storage.open import open_destination

_KEPT = "left alone, its process runs or may run, or it cannot be removed"
_FAILED = "left alone, the system does not let this process remove it"
_NEWER = "left alone, another version of stio made it; run `stio gc` of that version"
_KEPT_IN_STORE = "left alone, no index names it, but it is younger than --max-age, and its save may be under way"

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
def gc(path: str, dry_run: bool, max_age_hours: float, as_json: bool) -> int:
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
    found = {"path": path, "dry_run": dry_run, **dataclasses.asdict(report)}
    print_result(found, _lines(path, report, dry_run), as_json=as_json)
    return NO if report.failed else 0


def _lines(path: str, report: GarbageReport, dry_run: bool) -> Iterator[str]:
    would = "would be " if dry_run else ""
    for directories, text in (
        (report.finished, f"{would}completed, its checkpoint is published"),
        (report.undone, f"{would}rolled back, its checkpoint was not published"),
        (report.removed, f"{would}removed, an earlier cleanup was interrupted"),
        (report.unused, f"{would}deleted, no index names it"),
        (report.aborted, f"{would}aborted, its upload was not completed"),
        (report.newer, _NEWER),
        (report.failed, _FAILED),
        (
            [one for one in report.kept if one not in (*report.newer, *report.failed)],
            _KEPT_IN_STORE if is_url(path) else _KEPT,
        ),
    ):
        yield from (f"{one_line(directory)}: {text}" for directory in directories)
    if report == GarbageReport():
        exists = is_url(path) or os.path.lexists(path)
        yield f"{one_line(path)}: {'no save was interrupted here' if exists else _NO_DESTINATION}"
