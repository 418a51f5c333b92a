"""The manifest beside a checkpoint: digests of its files, noted by a save.

`stio.loading.integrity` holds them against the files. A digest is that of a whole file, so that `sha256sum` says the same. A
name has a list of acceptable states: a file is replaced by one rename, and the manifest is another file. So
shortly before a commit the manifest knows the old and the new state, and after it the new one only. Names are
compared and never opened. No torch here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from stio.errors import (
    FormatError,
    LimitError,
    printable,
)
from stio.format.json_scanner import Scanner
from stio.format.naming import MANIFEST_SUFFIX
from stio.runtime.hashing import ALGORITHMS, HashName

__all__ = [
    "MANIFEST_SUFFIX",
    "MAX_MANIFEST_BYTES",
    "FileState",
    "Manifest",
    "build_manifest",
    "merge_states",
    "parse_manifest",
]


VERSION = 1

_DIGEST = re.compile("[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class FileState:
    """One acceptable state of one file."""

    nbytes: int
    """Its size."""
    digest: str
    """Digest of all its bytes, in lower-case hexadecimal."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says."""

    algorithm: HashName
    """How its digests were made."""
    files: Mapping[str, tuple[FileState, ...]]
    """By a file's name, the states that it may be in; at least one each."""


# The file.


def parse_manifest(raw: bytes, *, path: str) -> Manifest:
    """Parse a manifest, which is as untrusted as the files that it speaks of.

    Args:
        raw: The file's bytes.
        path: File to name in errors.

    Raises:
        FormatError: Not JSON, a key that comes twice or is unknown, another version or algorithm, no digest.
        LimitError: It is longer than any that stio writes.
    """
    if len(raw) > MAX_MANIFEST_BYTES:
        raise LimitError(
            "the manifest is too long", path=path, expected=f"at most {MAX_MANIFEST_BYTES} bytes", found=len(raw)
        )
    scanner = Scanner(raw, path=path, base=0, error=FormatError, what="manifest")
    scanner.trim()
    algorithm = ""
    files: dict[str, tuple[FileState, ...]] = {}
    for key, start in _members(scanner, "version", "algorithm", "files"):
        if key == "version":
            version = scanner.integer()
            if version != VERSION:
                scanner.fail("unknown version; a newer stio may read it", at=start, expected=VERSION, found=version)
        elif key == "algorithm":
            algorithm = scanner.string()
            if algorithm not in ALGORITHMS:
                scanner.fail("unknown algorithm", at=start, expected=" or ".join(ALGORITHMS), found=algorithm)
        else:
            files = _read_files(scanner)
    scanner.finish()
    digits = ALGORITHMS[algorithm]
    for name, states in files.items():
        for state in states:
            if len(state.digest) != digits or not _DIGEST.fullmatch(state.digest):
                expected = f"{digits} hexadecimal digits in lower case"
                message = f"manifest: the digest of {printable(name)!r} is none of {algorithm}"
                raise FormatError(message, path=path, expected=expected, found=state.digest)
    return Manifest(cast(HashName, algorithm), files)


def _members(scanner: Scanner, *keys: str) -> Iterator[tuple[str, int]]:
    """Yield the keys of an object and where they stand, for the caller to read each value; each must come once."""
    begin = scanner.pos
    seen: list[str] = []
    members = scanner.open_object()
    while members:
        start = scanner.pos
        key = scanner.key()
        if key in seen or key not in keys:
            problem = "a key stands here twice" if key in seen else "unknown key"
            scanner.fail(problem, at=start, expected=", ".join(keys), found=key)
        seen.append(key)
        yield key, start
        members = scanner.next_member()
    if len(seen) != len(keys):
        scanner.fail("an object is incomplete", at=begin, expected=", ".join(keys), found=", ".join(seen) or "nothing")


def _read_files(scanner: Scanner) -> dict[str, tuple[FileState, ...]]:
    files: dict[str, tuple[FileState, ...]] = {}
    members = scanner.open_object()
    while members:
        start = scanner.pos
        name = scanner.key()
        if name in files:
            scanner.fail("a file's name stands here twice", at=start, expected="distinct names", found=name)
        files[name] = tuple(_read_states(scanner))
        members = scanner.next_member()
    return files


def _read_states(scanner: Scanner) -> list[FileState]:
    scanner.take(ord("["))
    states = []
    while True:
        values: dict[str, Any] = {}
        for key, _ in _members(scanner, "nbytes", "digest"):
            values[key] = scanner.integer() if key == "nbytes" else scanner.string()
        states.append(FileState(values["nbytes"], values["digest"]))
        scanner.skip_space()
        if scanner.peek() == ord("]"):
            scanner.pos += 1
            return states
        scanner.take(ord(","))


def build_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as text; the same bytes for the same content.

    Raises:
        ValueError: A name has no UTF-8.
    """
    files = {
        name: [{"nbytes": state.nbytes, "digest": state.digest} for state in states]
        for name, states in sorted(manifest.files.items())
    }
    document = {"version": VERSION, "algorithm": manifest.algorithm, "files": files}
    try:
        return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise ValueError(f"a manifest cannot hold a name that is not UTF-8: {printable(error.object[:80])}") from None


def merge_states(
    old: Mapping[str, tuple[FileState, ...]], new: Mapping[str, tuple[FileState, ...]]
) -> dict[str, tuple[FileState, ...]]:
    """Return all names of both, each with the states that either finds acceptable."""
    return {name: tuple(dict.fromkeys((*old.get(name, ()), *new.get(name, ())))) for name in {**old, **new}}


MAX_MANIFEST_BYTES = 64 << 20
"""Longest manifest: about 500,000 files; real ones name a few hundred."""
