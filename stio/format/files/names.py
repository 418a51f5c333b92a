"""Names: of the files of a checkpoint (shards, index, manifest), and the numbers of steps in paths of checkpoints.

Which names are safe, and which files a new save replaces. The names are the hub's, so that its readers read stio's
checkpoints. Paths of a training's checkpoints name their step: `run/step-100`, `epoch=0-step=4`, `100/model`.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import NamedTuple

from stio.errors import IndexFormatError, UnsafePathError, printable

FILE_SUFFIX = ".safetensors"
"""End of the name of each file of tensors."""

FILE_SUFFIXES = (FILE_SUFFIX, ".sft")
"""Ends of names of files of tensors that are read; stio writes the first one."""

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Ends of names of files of `torch.save`."""

INDEX_SUFFIX = ".index.json"
"""Follows the name that a single file would have."""

MANIFEST_SUFFIX = ".manifest.json"
"""Follows the name of the single file, or of the index without its own `.index.json`."""

_INDEX = re.compile(r"(?P<file>.+)\.index(?P<variant>(?:\.[^./]+)*)\.json", re.DOTALL)
_KIND = re.compile(r"(?P<stem>.+?)(?P<kind>\.(?:safetensors|sft|bin|pt|pth|ckpt))(?P<variant>(?:\.[^./]+)*)", re.DOTALL)
_SHARD = re.compile(r"(?P<before>|.*[-_.])(?P<k>[0-9]{1,9})-of-(?P<n>[0-9]{1,9})(?P<after>(?:[._-][^/]*)?)", re.DOTALL)

_RANK_PART = re.compile(r"shard-([0-9]{5,9})-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_OTHER_KINDS = re.compile(
    r".*[^.].*?("
    r"\.(?:safetensors?|sft|st|pt|pth|pt2|t7|bin|ckpt|pkl|pickle|joblib|npy|npz|gguf|ggml|llamafile|dduf|nemo|h5|hdf5|keras"
    r"|onnx|pb|tflite|mlmodel|engine|caffemodel|msgpack|pdparams|pdmodel|pdopt|distcp|mar|json|yaml|yml|toml|txt|csv|tsv"
    r"|zip|tar|gz|tgz|bz2|xz|zst|7z|parquet|arrow)"
    r"(?:\.(?:tmp|temp|part|partial|incomplete|download|crdownload|bak|backup|old|orig|new|lock|swp|index|[0-9]+)|~)*)",
    re.IGNORECASE | re.DOTALL,
)
"""Names of files that hold weights, of settings and of archives, also unfinished ones and copies of them."""

_OF_TRAININGS = re.compile(
    r"(training_args|trainer_state|optim|optimizer|lr_scheduler|scheduler|scaler|grad_scaler|sampler|dl_state_dict"
    r"|rng_state|random_states?|custom_checkpoint|.*optim_states)([-_.]?\d+)*\.(pt|pth|bin|ckpt)"
)
"""Names under which trainers store what is no weight: transformers, accelerate, DeepSpeed."""

# Hexadecimal and of this length: stio did not write `model-finetuned-00001-of-00002`.
_SAVE_ID = "[0-9a-f]{8,32}"
_PERCENT_ENCODED = re.compile("%[0-9a-fA-F]{2}")


# The numbers of steps in paths.

_WORD = r"(?:step|epoch|iteration|iter|checkpoint|ckpt)"
_AFTER_WORD = re.compile(rf"{_WORD}[^0-9A-Za-z]{{0,2}}([0-9]+)", re.IGNORECASE)
# Further numbers may follow: `epoch=0-step=100`, `step-3-loss-0.25`.
_STEP_FOLDER = re.compile(
    rf"(?:global[-_]?)?{_AFTER_WORD.pattern}"
    rf"(?:[^0-9A-Za-z]+{_AFTER_WORD.pattern}|[^0-9A-Za-z]+[A-Za-z_]+[=-][0-9]+|\.[0-9]+)*",
    re.IGNORECASE,
)
_STEP_NUMBER = re.compile(r"([0-9]+)(?:\.[0-9]+)*")
_RANK = re.compile(r"(?:rank|shard|part)[^0-9A-Za-z]{0,2}[0-9]+", re.IGNORECASE)
_RANK_OR_NUMBER = re.compile(rf"{_RANK.pattern}|{_STEP_NUMBER.pattern}", re.IGNORECASE)
_OF_MANY = re.compile(r"(?<=[0-9])[-_ ]?of[-_ ]?[0-9]+")
_SHARD_OF_MANY = re.compile(
    r"(?<!step)(?<!epoch)(?<!iter)(?<!iteration)"
    r"(?:-0[0-9]{4}-of-[0-9]{5}|(?<!checkpoint)(?<!ckpt)-[0-9]+-of-[0-9]+)[^/]*\.[a-z]",
    re.IGNORECASE,
)
"""A file. `step-9-of-1000` is a step of a training of 1,000 steps, and `run-9-of-1000` too if it is a directory.

`checkpoint-3-of-90` is a step, and `checkpoint-00001-of-00003` a shard.
"""
_DATE = re.compile(
    r"(?<![0-9])(?:(?:19|20)[0-9]{2}([-_.])[0-9]{1,2}\1[0-9]{1,2}"
    r"|(?:19|20)[0-9]{6}[-_.T][0-9]{2}[-_.]?[0-9]{2}(?:[-_.]?[0-9]{2})?)(?![0-9])"
)
"""A date, or without separators a date and a time."""
_UNFINISHED = re.compile(r"_?tmp[-_.].+|.+[-_.](?:tmp|temp|partial|incomplete)(?:\.[0-9]+)?|.+\.part", re.IGNORECASE)


_DELTA, _PLAIN = "delta", "model"
"""Begins of the names of a delta's files in a directory, and of those of a checkpoint."""


class FileName(str):
    """The name of a file or a directory, or a path that ends in one, and what the name says of it."""

    __slots__ = ()

    @property
    def is_hidden(self) -> bool:
        """Whether it begins with a dot: such a file is no part of the checkpoint in its directory.

        Systems and programs make them (`._model.safetensors` of macOS, `.model.old.safetensors`).
        """
        return self.rpartition("/")[2].startswith(".")

    @property
    def is_index(self) -> bool:
        """Whether it is the name of an index, of files of any kind.

        `transformers` and `diffusers` put the name of a variant before the suffix: `X.safetensors.index.fp16.json`.
        """
        return _INDEX.fullmatch(self) is not None

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is the name of a safetensors file, or of an index of such files."""
        return self.endswith(FILE_SUFFIXES) or (self.is_index and self.whole.endswith(FILE_SUFFIXES))

    @property
    def is_pickle(self) -> bool:
        """Whether it is the name of weights in a file of `torch.save`."""
        return self.endswith(PICKLE_SUFFIXES) and not self.startswith(".") and not self.is_of_training

    @property
    def is_of_training(self) -> bool:
        """Whether trainers store the state of a training, and no weights, in files of this name."""
        return _OF_TRAININGS.fullmatch(self) is not None

    @property
    def is_of_save(self) -> bool:
        """Whether it is the name of a shard with the id of a save."""
        return re.search(rf"-{_SAVE_ID}-[0-9]{{5,}}-of-[0-9]{{5,}}[^/]*{re.escape(FILE_SUFFIX)}\Z", self) is not None

    @property
    def without_delta(self) -> str | None:
        """Name that the checkpoint of a file would have as one file, if it were no delta; None: it is not named so."""
        whole = self.whole if self.shard is None else self.shard.whole
        if whole == _DELTA + FILE_SUFFIX:
            return _PLAIN + FILE_SUFFIX
        return whole.removeprefix(f"{_DELTA}-") if whole.startswith(f"{_DELTA}-") else None

    @property
    def whole(self) -> str:
        """Name that the file of an index would have, if it were not cut into shards; of other names the name itself.

        The name of a variant stands before the kind of the file, wherever it is in the name of the index:
        `X.fp16.safetensors` for `X.safetensors.index.fp16.json`, `X.fp16.safetensors.index.json` and the older
        `X.safetensors.fp16.index.json`.
        """
        index = _INDEX.fullmatch(self)
        if index is None:
            return str(self)
        file = _KIND.fullmatch(index["file"])
        if file is None:
            return index["file"]
        return f"{file['stem']}{file['variant']}{index['variant']}{file['kind']}"

    @property
    def shard(self) -> ShardNumber | None:
        """What it says about a shard; None: it is not the name of a shard."""
        match = _SHARD.fullmatch(self)
        if match is None:
            return None
        before, k, n, after = match.group("before", "k", "n", "after")
        digits = len(k) if k.startswith("0") or len(k) == len(n) else 0
        return ShardNumber(int(k), int(n), (before, f"-of-{n}{after}"), f"{before.rstrip('-_.')}{after}", digits)

    @property
    def rank(self) -> int | None:
        """The rank, from 1, whose parts of tensors a file of torch's HuggingFaceStorageWriter holds."""
        match = _RANK_PART.fullmatch(self)
        return None if match is None else int(match[1])

    @property
    def is_one_of_many(self) -> bool:
        """Whether it is the name of one of several shards, whose numbers are no step."""
        return _SHARD_OF_MANY.search(self) is not None

    @property
    def is_step(self) -> bool:
        """Whether a training gives such a name to a directory of a checkpoint: `step-4`, `checkpoint-500`."""
        return _STEP_FOLDER.fullmatch(self) is not None

    @property
    def is_dated(self) -> bool:
        """Whether it has a date and no step: the last number of a date would be taken for one."""
        return _DATE.search(self) is not None and _AFTER_WORD.search(self) is None

    @property
    def is_unfinished(self) -> bool:
        """Whether programs give such a name to a checkpoint until it is complete: `tmp-checkpoint-5`."""
        return _UNFINISHED.fullmatch(self) is not None

    @property
    def advice_for_destination(self) -> str:
        """What to do about a destination that looks like a file which stio does not write.

        `w.SAFETENSORS` is such a name: only lower case means one file. Other names are of directories, and get no
        advice.
        """
        match = None if self.endswith(FILE_SUFFIX) else _OTHER_KINDS.fullmatch(self)
        if match is None:
            return ""
        stem = self.whole.rpartition(".")[0] if self.is_index else self.removesuffix(match[1])
        return (
            f"looks like a file of another kind or name ({printable(match[1])}), and a save writes {FILE_SUFFIX} only: "
            f"{printable(stem + FILE_SUFFIX)!r} means one file, {printable(stem)!r} a directory. For a directory of "
            "this very name add a slash"
        )


@dataclass(frozen=True, slots=True)
class ShardNumber:
    """What the name of a shard says: `model-00002-of-00003.safetensors` is number 2 of 3 of `model.safetensors`."""

    k: int
    """Number of the shard."""
    n: int
    """How many there are."""
    around: tuple[str, str]
    """The text before and after the number: equal for all shards of one checkpoint."""
    whole: str
    """Name that the file would have, if it were not cut into shards."""
    digits: int
    """Digits of a number that is filled with zeros; 0: it is not."""

    def name(self, k: int) -> str:
        """Return the name of another shard of the same checkpoint."""
        return f"{k:0{self.digits}d}".join(self.around)


class FilePattern:
    """The names of a checkpoint's files by a pattern, such as `model{suffix}.safetensors`.

    Raises:
        TypeError: The pattern is not text.
        ValueError: `{suffix}` is not in it exactly once, or something else in braces is.
    """

    def __init__(self, pattern: str) -> None:
        if not isinstance(pattern, str):
            raise TypeError(f"a filename pattern is text, not {type(pattern).__name__}")
        self._before, suffix, self._after = pattern.partition("{suffix}")
        if not suffix or "{" in self.whole or "}" in self.whole:
            raise ValueError(
                "the filename pattern must hold {suffix} once, and nothing else in braces, not "
                f"{printable(pattern)!r}; without it the shards would overwrite each other"
            )

    @property
    def whole(self) -> str:
        """Name of the only file, without shards."""
        return self._before + self._after

    @property
    def index(self) -> str:
        """Name of the index over the shards."""
        return self.whole + INDEX_SUFFIX

    @property
    def manifest(self) -> str:
        """Name of the manifest of the files."""
        return self.whole + MANIFEST_SUFFIX

    @property
    def of_delta(self) -> str:
        """The pattern for a delta: other libraries must not take its files for the model's."""
        return f"{_DELTA}{'' if self._before == _PLAIN else f'-{self._before}'}{{suffix}}{self._after}"

    def shard(self, k: int, n: int, *, save_id: str | None = None) -> str:
        """Return the name of a shard.

        Args:
            k: Number of the shard, from 0. The name counts from 1.
            n: How many shards there are.
            save_id: Distinguishes the shards of one save from others in the directory: 8 to 32 lower-case hexadecimal
                digits.
        """
        if n == 1 and save_id is None:
            return self.whole
        mark = "" if save_id is None else f"-{save_id}"
        return f"{self._before}{mark}-{k + 1:05d}-of-{n:05d}{self._after}"

    def matches(self, name: str) -> bool:
        """Return whether a file of this name belongs to a checkpoint that was saved with this pattern.

        These are the names that the hub's saver removes (single file, shards, index), stio's names with a save id, and
        those of a delta, which a full save replaces.
        """
        before = "|".join(re.escape(start) for start in (self._before, self.of_delta.partition("{")[0]))
        before, after = f"(?:{before})", re.escape(self._after)
        rule = rf"{before}(?:(?:-{_SAVE_ID})?-[0-9]{{5,}}-of-[0-9]{{5,}})?{after}(?:{re.escape(INDEX_SUFFIX)})?"
        return re.fullmatch(rule, name) is not None

    def require_safe(self) -> None:
        """Require that a save may use the pattern: each name is a file in its directory, on every system.

        Raises:
            ValueError: It does not end in `.safetensors`, leads into another directory, begins with a dot, or gives a
                name that is not safe on every system.
        """
        shown = printable(f"{self._before}{{suffix}}{self._after}")
        if not self._after.endswith(FILE_SUFFIX):
            raise ValueError(f"the filename pattern must end in '{{suffix}}...{FILE_SUFFIX}', not {shown!r}")
        if "/" in self.whole or FileName(self.whole).is_hidden:
            raise ValueError(f"the filename pattern {shown!r} names a directory, or begins with a dot")
        try:
            self.whole.encode()
            check_shard_name(self.whole, path="filename_pattern")
        except ValueError as error:
            reason = getattr(error, "message", "it is no valid text")
            raise ValueError(f"the filename pattern {shown!r} gives an unsafe name: {reason}") from None


def check_shard_name(name: str, *, path: str, suffix: str = FILE_SUFFIX) -> None:
    """Require that a shard's name stays below the index's directory, on every system.

    The rules of POSIX and of Windows both apply: a checkpoint that is safe on one machine is safe on all. Links are not
    checked here: only opening the file shows them.

    Args:
        name: Name as in the index, with `/` between directories.
        path: The index, to name in errors.
        suffix: Required end of the name; empty for any.

    Raises:
        UnsafePathError: The name has a root, a drive, `..`, or characters that some system or layer interprets as such.
        IndexFormatError: The name is empty in a part, or has another suffix.
    """
    parts = name.split("/")
    rules = {
        "holds control characters": any(character < " " or character == "\x7f" for character in name),
        "holds a backslash, which separates folders on Windows": "\\" in name,
        # A drive (`C:x`), a stream of a file (`x:y`) and a URL (`s3://x`) all need the colon.
        "holds a colon: a drive, a stream or a URL": ":" in name,
        # Nothing here decodes percent signs, but a remote storage might: `%2e%2e%2f` is `../` there.
        "is percent-encoded": _PERCENT_ENCODED.search(name),
        "is absolute": name.startswith("/"),
        "holds '..', which leads out of its directory": ".." in parts,
        # Windows drops dots and spaces at the end of a part, so `.. ` is `..` there.
        "has a part of dots and spaces alone, which some systems take for '..'": any(
            part and not part.rstrip(". ") for part in parts
        ),
    }
    for reason, applies in rules.items():
        if applies:
            raise UnsafePathError(f"shard name {reason}", path=path, expected="a path below the index", found=name)
    if not name.endswith(suffix) or parts[-1] == suffix or "" in parts:
        message = "shard name is not the path of a file of tensors"
        raise IndexFormatError(
            message, path=path, expected=f"a name ending in {suffix}" if suffix else "a path", found=name
        )


class NamedStep(NamedTuple):
    """The step of a training that a path names."""

    number: int
    """Its number."""
    path: str
    """The path, up to the name that holds the number."""
    rest: str
    """What follows in the path."""

    @property
    def series(self) -> str:
        """The path without the numbers of its step: equal for the checkpoints that a run saves for each of its steps.

        Numbers of ranks, shards and parts stay, and those of folders that name no step.
        """
        *folders, name = self.path.split("/")
        folders = [_without_numbers(folder) if FileName(folder).is_step else folder for folder in folders]
        return "/".join((*folders, _without_numbers(name))) + self.rest


def step_of(path: str) -> NamedStep | None:
    """Return the step of a training that a path names.

    The first of these that exists:

    - the last number in the name that follows `step`, `epoch`, `iter`, `iteration`, `checkpoint` or `ckpt`;
    - that of the nearest folder whose whole name is such a word and a number: `step-100`, `epoch=0-step=100`;
    - the name of the parent folder, if it is a number: `100/model`;
    - the last number in the name, but for those of ranks, shards and parts, and for totals: `model-100_rank0`;
    - that of the nearest folder that begins with such a word and a number: `step-100-ema/model`.

    A name that begins with a dot, that of one of several shards, and a date hold no step.

    Args:
        path: Path of a destination, links resolved.

    Returns:
        None if there is no such number.
    """
    folders = _folders_above(path)
    name = FileName(posixpath.basename(path))
    text = "" if name.is_hidden or name.is_one_of_many or name.is_dated else name
    if numbers := _AFTER_WORD.findall(text):
        return _step(numbers, path, path)
    for folder in folders:
        if FileName(posixpath.basename(folder)).is_step:
            return _step(_AFTER_WORD.findall(posixpath.basename(folder)), folder, path)
    if folders and (alone := _STEP_NUMBER.fullmatch(posixpath.basename(folders[0]))):
        return _step([alone[1]], folders[0], path)
    if numbers := _STEP_NUMBER.findall(_OF_MANY.sub("", _RANK.sub("", text))):
        return _step(numbers, path, path)
    for folder in folders:
        if _AFTER_WORD.match(posixpath.basename(folder)):
            return _step(_AFTER_WORD.findall(posixpath.basename(folder)), folder, path)
    return None


def _step(numbers: list[str], named: str, path: str) -> NamedStep:
    return NamedStep(int(numbers[-1]), named, path[len(named) :])


def _folders_above(path: str) -> list[str]:
    """Return the folders above a path, the nearest first, without the root."""
    folders = []
    while (path := posixpath.dirname(path)).strip("/"):
        folders.append(path)
    return folders


def _without_numbers(name: str) -> str:
    return _RANK_OR_NUMBER.sub(lambda match: match[0] if match[1] is None else "#", name)
