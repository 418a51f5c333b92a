"""The manifest beside a checkpoint: digests of its files, recorded by a save.

`stio.storage.checkpoint.integrity` compares them with the files. A digest covers a whole file, as that of `sha256sum`
does. Each name has a list of acceptable states, because a file and the manifest are replaced by two renames: shortly
before a commit the manifest has the old and the new state, and after it the new one only. Names are compared and never
opened.

SHA-256 comes from the standard library. XXH3 comes from the package xxhash (extra `hash`), imported at its first use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, ClassVar, Literal, Protocol, cast

import msgspec

from stio.errors import FormatError, LimitError, install_command, printable
from stio.format.json_scanner import Scanner

# Hashes.

HashName = Literal["sha256", "xxh3"]
"""Values of `hash=`: SHA-256, or XXH3 with 128 bits (faster, but no protection against forgery)."""

ALGORITHMS: Mapping[str, int] = {"sha256": 64, "xxh3": 32}
"""Number of hexadecimal digits in a digest of each algorithm."""


class Hasher(Protocol):
    """The interface that `hashlib` and `xxhash` share."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes; releases the GIL if there are many."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


def new_hasher(algorithm: str) -> Hasher:
    """Return a new hasher; also the check of a `hash=` argument.

    Raises:
        ValueError: There is no such algorithm.
        ImportError: The algorithm is `xxh3`, and xxhash is not installed.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"hash= takes one of {', '.join(map(repr, ALGORITHMS))}, not {algorithm!r}")
    if algorithm == "sha256":
        return hashlib.sha256()
    try:
        return cast(Hasher, import_module("xxhash").xxh3_128())
    except ImportError as error:
        raise ImportError(f"the hash xxh3 comes from the package xxhash: {install_command('hash')}") from error


# The file.

_VERSION = 1


class FileState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One acceptable state of one file."""

    nbytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Size of the file."""
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]+\Z")]
    """Digest of all its bytes, in lower-case hexadecimal."""


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the file."""

    version: int
    algorithm: HashName
    files: dict[str, Annotated[tuple[FileState, ...], msgspec.Meta(min_length=1)]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a manifest."""

    MAX_BYTES: ClassVar[int] = 10 << 20
    """Longest manifest: about 60,000 files; real ones name a few hundred. It is decoded in one call."""

    algorithm: HashName
    """Hash function of the digests."""
    files: Mapping[str, tuple[FileState, ...]]
    """The acceptable states of each file, at least one, by its name."""
    in_names: bool = False
    """Whether there is no manifest, and the digests are the names of the files in the hub's cache."""

    @classmethod
    def parse(cls, raw: bytes, *, path: str) -> Manifest:
        """Parse a manifest, which is as untrusted as the files that it describes.

        Args:
            raw: The file's bytes.
            path: File to name in errors.

        Raises:
            FormatError: Not JSON, a repeated or unknown key, another version or algorithm, a malformed digest.
            LimitError: It is longer than any that stio writes.
        """
        if len(raw) > cls.MAX_BYTES:
            raise LimitError(
                "the manifest is too long", path=path, expected=f"at most {cls.MAX_BYTES} bytes", found=len(raw)
            )
        scanner = Scanner(raw, path=path, base=0, error=FormatError, what="manifest")
        try:
            document = msgspec.convert(scanner.decode(raw), _Document)
        except msgspec.ValidationError as error:
            message = f"manifest: {printable(str(error))}; it is incomplete, or a newer stio has written it"
            raise FormatError(message, path=path) from None
        if document.version != _VERSION:
            message = "manifest: unknown version; a newer stio may read it"
            raise FormatError(message, path=path, expected=_VERSION, found=document.version)
        digits = ALGORITHMS[document.algorithm]
        for name, states in document.files.items():
            for state in states:
                if len(state.digest) != digits:
                    message = f"manifest: the digest of {printable(name)!r} is not one of {document.algorithm}"
                    raise FormatError(message, path=path, expected=f"{digits} hexadecimal digits", found=state.digest)
        return cls(document.algorithm, document.files)

    def encode(self) -> bytes:
        """Return the manifest as JSON; equal content gives equal bytes.

        Raises:
            ValueError: A name cannot be encoded in UTF-8.
        """
        document = _Document(_VERSION, self.algorithm, dict(sorted(self.files.items())))
        try:
            return json.dumps(msgspec.to_builtins(document), indent=2, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError as error:
            shown = printable(error.object[:80])
            raise ValueError(f"a manifest cannot hold a name that is not UTF-8: {shown}") from None

    def merged(self, newer: Manifest) -> Manifest:
        """Return a manifest with the acceptable states of both; if the algorithms differ, only the newer one's."""
        if self.algorithm != newer.algorithm:
            return newer
        files = {
            name: tuple(dict.fromkeys((*self.files.get(name, ()), *newer.files.get(name, ()))))
            for name in {**self.files, **newer.files}
        }
        return Manifest(self.algorithm, files)


def manifest_change(
    old: bytes | None, algorithm: HashName | None, new: Mapping[str, FileState], *, path: str
) -> tuple[bytes | None, bytes | None] | None:
    """Return the manifest to write shortly before a commit, and the one after it; None if nothing changes.

    A checkpoint without a manifest, or with one of another algorithm, has none until the commit: otherwise a
    crash before it would leave the old files beside a manifest with other digests.

    Args:
        old: Content of the manifest now, None if there is none.
        algorithm: Hash function of the new files' digests. None if there are no digests: then there is no
            manifest after the commit, because the old one describes the old files.
        new: The new files by name.
        path: File to name in errors.
    """
    if algorithm is None:
        return None if old is None else (None, None)
    changed = Manifest(algorithm, {name: (state,) for name, state in new.items()})
    before = None
    if old is not None:
        with suppress(FormatError):
            known = Manifest.parse(old, path=path)
            if known.algorithm == algorithm:
                before = known.merged(changed).encode()
    return before, changed.encode()
