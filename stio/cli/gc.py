"""`stio gc PATH`: finishes or undoes saves whose process died, and removes what they left. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import click

from stio.cli.output import PATH, one_line
from stio.storage.commit.recovery import MAX_AGE_SECONDS, GarbageReport, collect_garbage

__all__ = ["gc"]


@click.command()
@click.argument("path", type=PATH)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option(
    "--max-age",
    "max_age_hours",
    metavar="HOURS",
    type=click.FloatRange(min=0),
    default=MAX_AGE_SECONDS / 3600,
    show_default=True,
    help="Where locks do not tell who lives (NFS, FUSE), leave younger ones alone.",
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def gc(path: str, dry_run: bool, max_age_hours: float, as_json: bool) -> None:
    """Clean up after saves whose process died.

    PATH is where they saved to. Those that had published their checkpoint are finished, others undone; saves under way
    are left alone. Every save does that by itself where it works: this is for places that none comes back to.
    """
    report = collect_garbage(path, max_age_seconds=max_age_hours * 3600, dry_run=dry_run)
    if as_json:
        click.echo(json.dumps({"path": path, "dry_run": dry_run, **dataclasses.asdict(report)}, indent=2))
    else:
        click.echo("\n".join(_lines(path, report, dry_run)))


def _lines(path: str, report: GarbageReport, dry_run: bool) -> Iterator[str]:
    for staging in report.finished:
        yield f"{one_line(staging)}: {'would be ' if dry_run else ''}finished, its checkpoint is published"
    for staging in report.undone:
        yield f"{one_line(staging)}: {'would be ' if dry_run else ''}undone, its checkpoint was not published"
    for trash in report.removed:
        yield f"{one_line(trash)}: {'would be ' if dry_run else ''}removed, a clean-up before this one was cut off"
    for staging in report.kept:
        yield f"{one_line(staging)}: left alone, its owner lives or may live, or it may not be removed"
    if report == GarbageReport():
        yield f"{one_line(path)}: no save was cut off here"
