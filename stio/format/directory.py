"""Which checkpoint the files of a directory are, decided by their names; pure.

An index decides; without one, the only file, or the only complete set of shards. Of several, the plain name is the
checkpoint, as in transformers and diffusers: `X` beside its variants such as `X.fp16`, and `model.safetensors` beside
files with other names. `.sft` files count if there is no `.safetensors` file. What is not certain is refused: two
checkpoints, or shards of which some are missing. Names that begin with a dot do not count. The rules are the same for
directories, stores and repositories, and for all loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stio.errors import AmbiguousCheckpointError, CheckpointNotFoundError, printable
from stio.format.naming import (
    FILE_SUFFIX,
    FILE_SUFFIXES,
    is_hidden,
    is_index,
    is_of_save,
    rank_of_part,
    shard_number,
    whole_name,
)
from stio.format.other_sources import WHOLE_BY_TORCH, FileKind, advice_for_names

_MODEL_NAME = "model.safetensors"
INDEX_NAME = f"{_MODEL_NAME}.index.json"
"""Name of the index that is used if a directory has several."""

_STAGING = ".stio-"
_NO_STAGING = (".stio-kept-", ".stio-written.json")
"""Names that a save leaves for good: what it may not delete, and the list of its files."""

_SHOWN_NAMES = 5
_SHOWN_MISSING = 3
_HIDDEN = "; a name that begins with a dot does not count, its path does"
_SEPARATE = ", or move the files of each set of shards into a directory of its own"
_UNDER_WAY = (
    "a save into this directory is under way or was interrupted, and without an index its shards may be of two saves; "
    "wait for its end, or clean up by `stio gc DIRECTORY`"
)
_INDEX_MISSING = (
    "the directory holds shards of a save of stio without their index, which alone names the shards of one save; get "
    "the index, or give the path of a shard to load it alone"
)


@dataclass(frozen=True, slots=True)
class NamedCheckpoint:
    """A checkpoint of a directory, by its names."""

    index: str | None
    """Its index."""
    files: tuple[str, ...]
    """Without an index: its files, shards in the order of their numbers."""
    whole: str
    """Name that it would have as one file."""

    @property
    def stem(self) -> str:
        """Its name without the suffix: that of a variant has a further part, such as `model.fp16`."""
        return next((self.whole.removesuffix(end) for end in FILE_SUFFIXES if self.whole.endswith(end)), self.whole)

    def is_variant_of(self, other: NamedCheckpoint) -> bool:
        """Return whether this is `X.fp16` where the other one is `X`. A number is a part, such as a layer."""
        return self.stem.startswith(f"{other.stem}.") and not self.stem[len(other.stem) + 1 :].isdigit()

    def __str__(self) -> str:
        if self.index is not None or len(self.files) == 1:
            return printable(self.index or self.files[0])
        return f"{printable(self.files[0])} and the other shards, {len(self.files):,} files"


def choose(
    names: Iterable[str],
    *,
    path: str,
    kind_of: Callable[[str], FileKind | None] = lambda name: None,
) -> NamedCheckpoint:
    """Return the checkpoint of a directory.

    Args:
        names: Names of the files in it.
        path: The directory, to name in errors.
        kind_of: Returns the kind of a file by its content, for the error if there is no checkpoint.

    Raises:
        CheckpointNotFoundError: There is none, or shards are missing.
        AmbiguousCheckpointError: There are several.
    """
    names = [*names]
    if INDEX_NAME in names:
        return of_index(INDEX_NAME)
    indices = [
        of_index(name)
        for name in names
        if not is_hidden(name) and is_index(name) and whole_name(name).endswith(FILE_SUFFIXES)
    ]
    files = without_index(names)
    found = _plain(indices)
    if indices:
        found = _plain(found + [file for file in files if all(one.is_variant_of(file) for one in found)])
    else:  # other readers of a directory take `.safetensors` alone
        found = _plain([file for file in files if file.whole.endswith(FILE_SUFFIX)] or files)
        if len(found) == 1 and found[0].files == (found[0].whole,):  # no shard
            return found[0]
    if len({rank for one in found for name in one.files if (rank := rank_of_part(name)) is not None}) > 1:
        raise CheckpointNotFoundError(
            f"the files are of several ranks, each with its parts of the tensors; {WHOLE_BY_TORCH}",
            path=path,
            found=_few([*map(str, found)], len(found)),
        )
    if len(found) == 1:
        require_complete(found[0].files, path=path)
        return found[0]
    if not found:  # what is left are files of other kinds, of saves that did not commit, or with a dot
        raise CheckpointNotFoundError(
            why_none(names) + advice_for_names(names, path, kind_of),
            path=path,
            expected=f"{INDEX_NAME} or one *{FILE_SUFFIX}",
            found=_few(names, len(names)) or "an empty directory",
        )
    raise AmbiguousCheckpointError(
        f"the directory holds several checkpoints, and no {INDEX_NAME} selects one; give the path of the one you mean"
        + (_SEPARATE if any(len(one.files) > 1 for one in found) else ""),
        path=path,
        found=_few([*map(str, found)], len(found)),
    )


def _plain(several: list[NamedCheckpoint]) -> list[NamedCheckpoint]:
    """Return the one that other readers take of several: a variant is loaded only if it is named. Or return all."""
    if len(several) < 2:
        return several
    for one in several:
        if all(other is one or other.is_variant_of(one) for other in several):
            return [one]
    model = [one for one in several if one.whole == _MODEL_NAME]
    return model if len(model) == 1 and model[0].files == (_MODEL_NAME,) else several


def why_none(names: Iterable[str]) -> str:
    """Return why none of these names is that of a checkpoint, and what to do."""
    names = [*names]
    files = [name for name in names if name.endswith(FILE_SUFFIXES)]
    shown = [name for name in files if not is_hidden(name)]
    if shown and any(map(_is_of_work, names)):
        return _UNDER_WAY
    if any(map(is_of_save, shown)):
        return _INDEX_MISSING
    message = "the directory holds no checkpoint; give a directory with .safetensors files, or a file"
    return message + _HIDDEN if files else message


def _is_of_work(name: str) -> bool:
    """Return whether a name is that of what a save makes while it works."""
    return name.startswith(_STAGING) and not name.startswith(_NO_STAGING)


def of_index(name: str) -> NamedCheckpoint:
    """Return the checkpoint of an index."""
    return NamedCheckpoint(name, (), whole_name(name))


def without_index(names: Iterable[str], suffixes: tuple[str, ...] = FILE_SUFFIXES) -> list[NamedCheckpoint]:
    """Return the checkpoints that files are without an index: single files, and the shards of a set together.

    Args:
        names: Names of the files of a directory.
        suffixes: Ends of the names that count.
    """
    names = [*names]
    # Shards with the id of a save are a checkpoint by their index alone: their save has not committed. One that was
    # interrupted before its index was in place may have moved shards with other names.
    interrupted = any(map(_is_of_work, names))
    sets: dict[object, list[tuple[int, str, str]]] = {}
    for name in names:
        if is_hidden(name) or not name.endswith(suffixes) or is_of_save(name):
            continue
        shard = shard_number(name)
        if shard is None:
            sets[name] = [(0, name, name)]
        elif not interrupted:
            sets.setdefault(shard.around, []).append((shard.k, name, shard.whole))
    checkpoints = []
    for members in sets.values():
        members.sort()
        checkpoints.append(NamedCheckpoint(None, tuple([name for _, name, _ in members]), members[0][2]))
    return checkpoints


def require_complete(files: Sequence[str], *, path: str) -> None:
    """Require that the files of one checkpoint without an index are all of its shards, by their names.

    Raises:
        CheckpointNotFoundError: They are not.
    """
    shards = [shard for name in files if (shard := shard_number(name)) is not None]
    if not shards:
        return
    numbers, total = {shard.k for shard in shards}, shards[0].n
    first = 0 if 0 in numbers else 1
    present = sum(first <= k < first + total for k in numbers)
    if present == len(files) == total:
        return
    # The total is any number that a name has, so that not all of them are looked at.
    missing = [k for k in range(first, first + min(total, present + _SHOWN_MISSING)) if k not in numbers]
    raise CheckpointNotFoundError(
        "the directory has no index, and by their names its shards are not all of the checkpoint; the download may be "
        "incomplete. Get the missing files, or give the path of a shard to load it alone",
        path=path,
        expected=_few([shards[0].name(k) for k in missing[:_SHOWN_MISSING]], total - present) or f"{total:,} shards",
        found=f"{len(files):,} of {total:,} shards" if missing else f"{len(files):,} files",
    )


def beside(
    index: str, shards: Iterable[str], names: Iterable[str], suffixes: tuple[str, ...] = FILE_SUFFIXES
) -> tuple[list[str], list[str]]:
    """Return the files of tensors in the directory of an index that the index does not name.

    Args:
        index: Name of the index.
        shards: The files that it names.
        names: Names of the files in its directory.
        suffixes: Ends of the names that count.

    Returns:
        Those that have its name, whole or in shards. And others, which may hold anything; of a set the first shard.
        Variants of it are in neither.
    """
    named, own = set(shards), of_index(index)
    same: list[str] = []
    others: list[str] = []
    for one in without_index((name for name in names if name not in named), suffixes):
        if one.stem == own.stem:
            same += one.files
        elif not one.is_variant_of(own):
            others.append(one.files[0])
    return same, others


def warning_of_others(path: str, loaded: str, files: Sequence[str]) -> str:
    """Return a warning of files beside a checkpoint, one of which may be a newer one.

    Args:
        path: The directory.
        loaded: Name of the index or of the file that is loaded.
        files: The others, at least one.
    """
    decides = f"the index {printable(loaded)} decides what is" if is_index(loaded) else f"{printable(loaded)} is"
    instead = "the index and its shards" if is_index(loaded) else printable(loaded)
    return (
        f"{printable(path)}: {decides} loaded, and {_few(files[:1], len(files))} in the same directory is not read; if "
        f"that is the newer checkpoint, load it by its path, or delete {instead}"
    )


def warning_of_gone_shards(path: str, index: str, file: str) -> str:
    """Return a warning that a whole file is loaded instead of an index, none of whose shards exists."""
    return (
        f"{printable(path)}: none of the shards exists that the index {printable(index)} names, so {printable(file)} "
        "is loaded; if that is right, delete the index"
    )


def advice_for_gone_shards(index: str, names: Iterable[str]) -> str:
    """Return what to do about an index none of whose shards exists, by the other names in its directory."""
    names = [*names]
    others = [of_index(name) for name in names if is_index(name) and name != index and not is_hidden(name)]
    files = without_index(names)
    for one in [*files, *others]:
        with suppress(CheckpointNotFoundError):
            require_complete(one.files, path="")
            how = "delete the index" if _plain(files) == [one] else "move them into a directory of their own"
            how = "give its path" if one.index or len(one.files) == 1 else how
            return f"; none of the index's shards exists, and {one} beside it may be the checkpoint: {how} to load it"
    return "; none of the index's shards exists"


def _few(names: Sequence[str], number: int) -> str:
    """Return the first of so many names, for a message."""
    first = names[:_SHOWN_NAMES]
    left = number - len(first)
    more = f" and {left:,} other{'s' if left > 1 else ''}" if left > 0 else ""
    return ", ".join(map(printable, first)) + more
