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

from stio.errors import AmbiguousCheckpointError, CheckpointNotFoundError, listed, printable
from stio.format.files.names import FILE_SUFFIX, FILE_SUFFIXES, INDEX_SUFFIX, FileName
from stio.format.files.other_kinds import WHOLE_BY_TORCH, FileKind, advice_for_names

_MODEL_NAME = "model.safetensors"
_DELTA_NAME = "delta.safetensors"
_INDEX_NAME = _MODEL_NAME + INDEX_SUFFIX  # it is used if a directory has several

_STAGING = ".stio-"
_NO_STAGING = (".stio-kept-", ".stio-written.json")
"""Names that a save leaves for good: what it may not delete, and the list of its files."""

_SHOWN_MISSING = 3
_GONE = "; none of the index's shards exists"
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

    @classmethod
    def of_index(cls, name: str) -> NamedCheckpoint:
        """Return the checkpoint of an index."""
        return cls(name, (), FileName(name).whole)

    @classmethod
    def without_index(cls, names: Iterable[str], suffixes: tuple[str, ...] = FILE_SUFFIXES) -> list[NamedCheckpoint]:
        """Return the checkpoints that files are without an index: single files, and the shards of a set together.

        Args:
            names: Names of the files of a directory.
            suffixes: Ends of the names that count.
        """
        of_directory = [*map(FileName, names)]
        # Shards with the id of a save are a checkpoint by their index alone: their save has not committed. One that was
        # interrupted before its index was in place may have moved shards with other names.
        interrupted = any(map(_is_of_work, of_directory))
        sets: dict[object, list[tuple[int, str, str]]] = {}
        for name in of_directory:
            if name.is_hidden or not name.endswith(suffixes) or name.is_of_save:
                continue
            shard = name.shard
            if shard is None:
                sets[name] = [(0, str(name), str(name))]
            elif not interrupted:
                sets.setdefault(shard.around, []).append((shard.k, str(name), shard.whole))
        return [cls(None, tuple([name for _, name, _ in sorted(of_set)]), of_set[0][2]) for of_set in sets.values()]

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

    def require_complete(self, *, path: str) -> None:
        """Require that the files, without an index, are all shards of the checkpoint, by their names.

        Args:
            path: The directory, to name in errors.

        Raises:
            CheckpointNotFoundError: They are not.
        """
        shards = [shard for name in self.files if (shard := FileName(name).shard) is not None]
        if not shards:
            return
        numbers, total = {shard.k for shard in shards}, shards[0].n
        first = 0 if 0 in numbers else 1
        present = sum(first <= k < first + total for k in numbers)
        if present == len(self.files) == total:
            return
        # The total is any number that a name has, so that not all of them are looked at.
        missing = [k for k in range(first, first + min(total, present + _SHOWN_MISSING)) if k not in numbers]
        shown = [shards[0].name(k) for k in missing[:_SHOWN_MISSING]]
        raise CheckpointNotFoundError(
            "the directory has no index, and by their names its shards are not all of the checkpoint; the download may "
            "be incomplete. Get the missing files, or give the path of a shard to load it alone",
            path=path,
            expected=listed(shown, more=total - present - len(shown)) if missing else f"{total:,} shards",
            found=f"{len(self.files):,} of {total:,} shards" if missing else f"{len(self.files):,} files",
        )

    def beside(
        self, shards: Iterable[str], names: Iterable[str], suffixes: tuple[str, ...] = FILE_SUFFIXES
    ) -> tuple[list[str], list[str]]:
        """Return the files of tensors in the directory that are not of this checkpoint.

        Args:
            shards: Its files.
            names: Names of the files in the directory.
            suffixes: Ends of the names that count.

        Returns:
            Those that have its name, whole or in shards. And others, which may hold anything; of a set the first
            shard. Variants of it are in neither.
        """
        own = set(shards)
        same: list[str] = []
        others: list[str] = []
        for other in self.without_index((name for name in names if name not in own), suffixes):
            if other.stem == self.stem:
                same += other.files
            elif not other.is_variant_of(self):
                others.append(other.files[0])
        return same, others

    def warning_of_others(self, path: str, files: Sequence[str]) -> str:
        """Return a warning of files beside the checkpoint, one of which may be a newer one.

        Args:
            path: The directory.
            files: The others, at least one.
        """
        loaded = printable(self.index or self.whole)
        decides = f"the index {loaded} decides what is" if self.index else f"{loaded} is"
        instead = "the index and its shards" if self.index else loaded
        shown = listed(files[:1], more=len(files) - 1)
        return (
            f"{printable(path)}: {decides} loaded, and {shown} in the same directory is not read; if "
            f"that is the newer checkpoint, load it by its path, or delete {instead}"
        )

    def warning_of_gone_shards(self, path: str, file: str) -> str:
        """Return a warning that a whole file is loaded instead of the index, none of whose shards exists."""
        return (
            f"{printable(path)}: none of the shards exists that the index {printable(self.index)} names, so "
            f"{printable(file)} is loaded; if that is right, delete the index"
        )

    def advice_for_gone_shards(self, names: Iterable[str]) -> str:
        """Return what to do about the index, none of whose shards exists, by the names in its directory."""
        beside = [*map(FileName, names)]
        others = [self.of_index(name) for name in beside if name.is_index and name != self.index and not name.is_hidden]
        files = self.without_index(beside)
        for other in [*files, *others]:
            with suppress(CheckpointNotFoundError):
                other.require_complete(path="")
                how = "delete the index" if _plain(files) == [other] else "move them into a directory of their own"
                how = "give its path" if other.index or len(other.files) == 1 else how
                return f"{_GONE}, and {other} beside it may be the checkpoint: {how} to load it"
        return _GONE


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
    present = [*map(FileName, names)]
    if present == [_MODEL_NAME]:
        return NamedCheckpoint(None, (_MODEL_NAME,), _MODEL_NAME)
    if _INDEX_NAME in present:
        return NamedCheckpoint.of_index(_INDEX_NAME)
    # A full save beside a delta has replaced it.
    present = [name for name in present if name.without_delta not in present]
    chosen = _plain(
        [
            NamedCheckpoint.of_index(str(name))
            for name in present
            if not name.is_hidden and name.is_index and name.whole.endswith(FILE_SUFFIXES)
        ]
    )
    files = NamedCheckpoint.without_index(present)
    if chosen:
        chosen = _plain(chosen + [file for file in files if all(other.is_variant_of(file) for other in chosen)])
    else:  # other readers of a directory take `.safetensors` alone
        chosen = _plain([file for file in files if file.whole.endswith(FILE_SUFFIX)] or files)
        if len(chosen) == 1 and chosen[0].files == (chosen[0].whole,):  # no shard
            return chosen[0]
    if len({rank for of_name in chosen for name in of_name.files if (rank := FileName(name).rank) is not None}) > 1:
        raise CheckpointNotFoundError(
            f"the files are of several ranks, each with its parts of the tensors; {WHOLE_BY_TORCH}",
            path=path,
            found=listed(map(str, chosen)),
        )
    if len(chosen) == 1:
        chosen[0].require_complete(path=path)
        return chosen[0]
    if not chosen:  # what is left are files of other kinds, of saves that did not commit, or with a dot
        raise CheckpointNotFoundError(
            _why_none(present) + advice_for_names(present, path, kind_of),
            path=path,
            expected=f"{_INDEX_NAME} or one *{FILE_SUFFIX}",
            found=listed(present) if present else "an empty directory",
        )
    raise AmbiguousCheckpointError(
        f"the directory holds several checkpoints, and no {_INDEX_NAME} selects one; give the path of the one you mean"
        + (_SEPARATE if any(len(of_name.files) > 1 for of_name in chosen) else ""),
        path=path,
        found=listed(map(str, chosen)),
    )


def _plain(several: list[NamedCheckpoint]) -> list[NamedCheckpoint]:
    """Return the one that other readers take of several: a variant is loaded only if it is named. Or return all."""
    if len(several) < 2:
        return several
    for plain in several:
        if all(other is plain or other.is_variant_of(plain) for other in several):
            return [plain]
    model = [of_name for of_name in several if of_name.whole in (_MODEL_NAME, _DELTA_NAME)]
    return model if len(model) == 1 and model[0].files == (model[0].whole,) else several


def _why_none(names: Sequence[FileName]) -> str:
    """Return why none of these names is that of a checkpoint, and what to do."""
    files = [name for name in names if name.endswith(FILE_SUFFIXES)]
    shown = [name for name in files if not name.is_hidden]
    if shown and any(map(_is_of_work, names)):
        return _UNDER_WAY
    if any(name.is_of_save for name in shown):
        return _INDEX_MISSING
    message = "the directory holds no checkpoint; give a directory with .safetensors files, or a file"
    return message + _HIDDEN if files else message


def _is_of_work(name: str) -> bool:
    """Return whether a name is that of what a save makes while it works."""
    return name.startswith(_STAGING) and not name.startswith(_NO_STAGING)
