"""Names: of the files of a checkpoint (shards, index, manifest), and the numbers of steps in paths of checkpoints.

Which names are safe, and which files a new save replaces. The names are the hub's, so that its readers read stio's
checkpoints. Paths of a training's checkpoints name their step: `run/step-100`, `epoch=0-step=4`, `100/model`.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import NoReturn

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

# Hexadecimal and of this length: stio did not write `model-finetuned-00001-of-00002`.
_SAVE_ID = "[0-9a-f]{8,32}"
_PERCENT_ENCODED = re.compile("%[0-9a-fA-F]{2}")


def advice_for_destination(name: str) -> str:
    """Return what to do about the name of a destination that looks like a file which stio does not write.

    `w.SAFETENSORS` is such a name: only lower case means one file. Other names are of directories, and get no advice.
    """
    found = None if name.endswith(FILE_SUFFIX) else _OTHER_KINDS.fullmatch(name)
    if found is None:
        return ""
    stem = whole_name(name).rpartition(".")[0] if is_index(name) else name.removesuffix(found[1])
    return (
        f"looks like a file of another kind or name ({printable(found[1])}), and a save writes {FILE_SUFFIX} only: "
        f"{printable(stem + FILE_SUFFIX)!r} means one file, {printable(stem)!r} a directory. For a directory of this "
        "very name add a slash"
    )


def is_hidden(name: str) -> bool:
    """Return whether a name begins with a dot: such a file is no part of the checkpoint in its directory.

    Systems and programs make them (`._model.safetensors` of macOS, `.model.old.safetensors`).
    """
    return name.rpartition("/")[2].startswith(".")


def is_index(name: str) -> bool:
    """Return whether a file of this name is an index, of files of any kind.

    `transformers` and `diffusers` put the name of a variant before the suffix: `X.safetensors.index.fp16.json`.
    """
    return _INDEX.fullmatch(name) is not None


def names_checkpoint(name: str) -> bool:
    """Return whether a path ends in the name of a safetensors file, or of an index of such files."""
    return name.endswith(FILE_SUFFIXES) or (is_index(name) and whole_name(name).endswith(FILE_SUFFIXES))


def names_file(path: str) -> bool:
    """Return whether a path ends in the name of a file of weights, also one of `torch.save`, or of an index."""
    return path.endswith((*FILE_SUFFIXES, *PICKLE_SUFFIXES)) or is_index(path)


def whole_name(index: str) -> str:
    """Return the name that the file of an index would have, if it were not cut into shards.

    The name of a variant stands before the kind of the file, wherever it is in the name of the index:
    `X.fp16.safetensors` for `X.safetensors.index.fp16.json`, `X.fp16.safetensors.index.json` and the older
    `X.safetensors.fp16.index.json`.
    """
    found = _INDEX.fullmatch(index)
    if found is None:
        return index
    file = _KIND.fullmatch(found["file"])
    if file is None:
        return found["file"]
    return f"{file['stem']}{file['variant']}{found['variant']}{file['kind']}"


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


def shard_number(name: str) -> ShardNumber | None:
    """Return what a name says about a shard; None: it is not the name of a shard."""
    found = _SHARD.fullmatch(name)
    if found is None:
        return None
    before, k, n, after = found.group("before", "k", "n", "after")
    digits = len(k) if k.startswith("0") or len(k) == len(n) else 0
    return ShardNumber(int(k), int(n), (before, f"-of-{n}{after}"), f"{before.rstrip('-_.')}{after}", digits)


def rank_of_part(name: str) -> int | None:
    """Return the rank, from 1, whose parts of tensors a file of torch's HuggingFaceStorageWriter holds, by its name."""
    found = _RANK_PART.fullmatch(name)
    return None if found is None else int(found[1])


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

    def unsafe(reason: str) -> NoReturn:
        raise UnsafePathError(f"shard name {reason}", path=path, expected="a path below the index", found=name)

    if any(character < " " or character == "\x7f" for character in name):
        unsafe("holds control characters")
    if "\\" in name:
        unsafe("holds a backslash, which separates folders on Windows")
    # A drive (`C:x`), a stream of a file (`x:y`) and a URL (`s3://x`) all need the colon.
    if ":" in name:
        unsafe("holds a colon: a drive, a stream or a URL")
    # Nothing here decodes percent signs, but a remote storage might: `%2e%2e%2f` is `../` there.
    if _PERCENT_ENCODED.search(name):
        unsafe("is percent-encoded")
    parts = name.split("/")
    if name.startswith("/"):
        unsafe("is absolute")
    if ".." in parts:
        unsafe("holds '..', which leads out of its directory")
    # Windows drops dots and spaces at the end of a part, so `.. ` is `..` there.
    if any(part and not part.rstrip(". ") for part in parts):
        unsafe("has a part of dots and spaces alone, which some systems take for '..'")
    if not name.endswith(suffix) or parts[-1] == suffix or "" in parts:
        message = "shard name is not the path of a file of tensors"
        raise IndexFormatError(
            message, path=path, expected=f"a name ending in {suffix}" if suffix else "a path", found=name
        )


def check_pattern(pattern: str) -> None:
    """Require that a pattern gives each shard a distinct name, in the checkpoint's directory, on every system.

    Args:
        pattern: Such as `model{suffix}.safetensors`.

    Raises:
        TypeError: Not text.
        ValueError: `{suffix}` is not in it exactly once, something else in braces is, it does not end in
            `.safetensors`, leads into another directory, begins with a dot, or gives a name that is not safe on every
            system.
    """
    before, after = _around_suffix(pattern)
    if not after.endswith(FILE_SUFFIX):
        raise ValueError(f"the filename pattern must end in '{{suffix}}...{FILE_SUFFIX}', not {printable(pattern)!r}")
    if any(character in pattern for character in "/\\\0"):
        raise ValueError(f"the filename pattern {printable(pattern)!r} must name files, without a directory or NUL")
    if is_hidden(before + after):
        raise ValueError(
            f"the filename pattern {printable(pattern)!r} begins with a dot; no load of the directory takes such files"
        )
    try:
        name = f"{before}{after}"
        name.encode()
        check_shard_name(name, path="filename_pattern")
    except ValueError as error:
        reason = getattr(error, "message", "it is no valid text")
        raise ValueError(f"the filename pattern {printable(pattern)!r} gives an unsafe name: {reason}") from None


def _around_suffix(pattern: str) -> tuple[str, str]:
    """Return the text before and after `{suffix}`."""
    if not isinstance(pattern, str):
        raise TypeError(f"a filename pattern is text, not {type(pattern).__name__}")
    before, found, after = pattern.partition("{suffix}")
    if not found or "{" in before or "}" in before or "{" in after or "}" in after:
        raise ValueError(
            f"the filename pattern must hold {{suffix}} once, and nothing else in braces, not {printable(pattern)!r}; "
            "without it the shards would overwrite each other"
        )
    return before, after


def shard_name(pattern: str, k: int, n: int, *, save_id: str | None = None) -> str:
    """Return the name of a shard.

    Args:
        pattern: Such as `model{suffix}.safetensors`.
        k: Number of the shard, from 0. The name counts from 1.
        n: How many shards there are.
        save_id: Distinguishes the shards of one save from others in the directory: 8 to 32 lower-case hexadecimal
            digits.

    Raises:
        ValueError: There is no such shard, or the save id is malformed.
    """
    if not 0 <= k < n:
        raise ValueError(f"there is no shard {k} of {n}; they count from 0")
    if save_id is not None and not re.fullmatch(_SAVE_ID, save_id):
        raise ValueError(f"a save id is 8 to 32 lower-case hexadecimal digits, not {printable(save_id)!r}")
    before, after = _around_suffix(pattern)
    if n == 1 and save_id is None:
        return before + after
    mark = "" if save_id is None else f"-{save_id}"
    return f"{before}{mark}-{k + 1:05d}-of-{n:05d}{after}"


def index_name(pattern: str) -> str:
    """Return the name of the index over the shards of a pattern."""
    return "".join(_around_suffix(pattern)) + INDEX_SUFFIX


def manifest_name(pattern: str) -> str:
    """Return the name of the manifest of the files of a pattern."""
    return "".join(_around_suffix(pattern)) + MANIFEST_SUFFIX


def is_of_save(name: str) -> bool:
    """Return whether a file of this name is a shard with the id of a save."""
    return re.search(rf"-{_SAVE_ID}-[0-9]{{5,}}-of-[0-9]{{5,}}[^/]*{re.escape(FILE_SUFFIX)}\Z", name) is not None


def is_checkpoint_file(name: str, pattern: str) -> bool:
    """Return whether a file of this name belongs to a checkpoint that was saved with this pattern.

    These are the names that the hub's saver removes (single file, shards, index), and stio's names with a save id.
    """
    before, after = map(re.escape, _around_suffix(pattern))
    rule = rf"{before}(?:(?:-{_SAVE_ID})?-[0-9]{{5,}}-of-[0-9]{{5,}})?{after}(?:{re.escape(INDEX_SUFFIX)})?"
    return re.fullmatch(rule, name) is not None


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


def step_of(path: str) -> tuple[int, str] | None:
    """Return the number of the step of a training that a path names, and the path up to the name that holds the number.

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
    name = posixpath.basename(path)
    name = "" if is_hidden(name) or is_shard_name(name) or is_dated(name) else name
    if found := _AFTER_WORD.findall(name):
        return int(found[-1]), path
    for folder in folders:
        if is_step_directory(posixpath.basename(folder)):
            return int(_AFTER_WORD.findall(posixpath.basename(folder))[-1]), folder
    if folders and (alone := _STEP_NUMBER.fullmatch(posixpath.basename(folders[0]))):
        return int(alone[1]), folders[0]
    if found := _STEP_NUMBER.findall(_OF_MANY.sub("", _RANK.sub("", name))):
        return int(found[-1]), path
    for folder in folders:
        if _AFTER_WORD.match(posixpath.basename(folder)):
            return int(_AFTER_WORD.findall(posixpath.basename(folder))[-1]), folder
    return None


def _folders_above(path: str) -> list[str]:
    """Return the folders above a path, the nearest first, without the root."""
    folders = []
    while (path := posixpath.dirname(path)).strip("/"):
        folders.append(path)
    return folders


def is_shard_name(name: str) -> bool:
    """Return whether a name is that of one of several shards, and its numbers are no step."""
    return _SHARD_OF_MANY.search(name) is not None


def step_named(name: str) -> int | None:
    """Return the step that the name of a directory's entry holds; None: it holds none. See `step_of`."""
    found = step_of(name)
    return None if found is None else found[0]


def is_step_directory(name: str) -> bool:
    """Return whether a name is one that a training gives to a directory of a checkpoint: `step-4`, `checkpoint-500`."""
    return _STEP_FOLDER.fullmatch(name) is not None


def is_dated(name: str) -> bool:
    """Return whether a name has a date and no step: the last number of a date would be taken for one."""
    return _DATE.search(name) is not None and _AFTER_WORD.search(name) is None


def is_unfinished(name: str) -> bool:
    """Return whether a name is one that programs give to a checkpoint until it is complete: `tmp-checkpoint-5`."""
    return _UNFINISHED.fullmatch(name) is not None


def series_of(path: str) -> str | None:
    """Return a path without the numbers of its step: equal for the checkpoints that a run saves for each of its steps.

    Numbers of ranks, shards and parts stay, and those of folders that name no step.
    """
    named = step_of(path)
    if named is None:
        return None
    folders = posixpath.dirname(named[1]).split("/")
    folders = [_without_numbers(folder) if is_step_directory(folder) else folder for folder in folders]
    return "/".join((*folders, _without_numbers(posixpath.basename(named[1])))) + path[len(named[1]) :]


def _without_numbers(name: str) -> str:
    return _RANK_OR_NUMBER.sub(lambda found: found[0] if found[1] is None else "#", name)
