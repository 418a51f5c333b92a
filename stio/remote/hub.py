"""Repositories of models on the Hugging Face hub, as directories: their files are in the hub's own cache.

A revision is resolved to a commit once, and all files are of that commit. A file is downloaded by huggingface_hub when
it is opened, or ahead of that with others: so of a sharded checkpoint first the index is there, and then only the
shards that a load needs. Tokens, endpoints, the cache's place and its locks are that package's matter.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from errno import EACCES, EHOSTUNREACH, EIO, ENOENT
from functools import partial
from importlib import import_module
from typing import Any, TypeVar
from urllib.parse import unquote

from stio.errors import CheckpointNotFoundError, FormatError, StioError, StorageError, install_command
from stio.format.files import FILE_SUFFIX, INDEX_SUFFIX, PICKLE_SUFFIXES, FileName
from stio.remote.requests import for_each, short_line
from stio.remote.source import key_at
from stio.runtime import calls
from stio.storage import Source, open_file
from stio.text import log, without_secrets

T = TypeVar("T")

_NUM_DOWNLOADS = 8
"""Files that are downloaded at one time: as many as the hub's own function does."""
_CHECKPOINTS = (f"model{FILE_SUFFIX}{INDEX_SUFFIX}", f"model{FILE_SUFFIX}")
_URL = re.compile(
    r"hf://(?:models/)?(?P<repository>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr/\d+|convert/[\w.-]+)|[^/]+))?(?:/(?P<key>.*))?",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_TYPES = ("datasets", "spaces", "buckets", "kernels")
_UNREACHABLE = {
    "LocalEntryNotFoundError",
    "HfHubHTTPError",
    "ConnectionError",
    "TransportError",
    "Timeout",
    "ProxyError",
    "SSLError",
}
_MISSING = {
    "RepositoryNotFoundError": "the hub has no such repository, or it is private; check the name, and log in by "
    "`hf auth login`, or set HF_TOKEN",
    "RevisionNotFoundError": "the repository has no such revision; check the name after the @",
    "EntryNotFoundError": "the repository has no such file",
    "HFValidationError": "the hub has no repositories of this name",
}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKEN = re.compile(r"hf_\w{8,}")


@dataclass(frozen=True, slots=True)
class HubLocation:
    """A directory of a repository."""

    repository: str
    """Owner and name."""
    revision: str | None
    """Branch, tag or commit; None: the default branch."""
    folder: str
    """Path of the directory, "" for the repository's own."""

    def shown(self, revision: str | None) -> str:
        """Return the URL with a revision."""
        at = f"@{revision}" if revision else ""
        return f"hf://{self.repository}{at}" + (f"/{self.folder}" if self.folder else "")


def _text_of(error: BaseException) -> str:
    """Return the text of an error on one line: without tokens, and without what a signed URL gives access to."""
    return short_line(_TOKEN.sub("hf_...", str(error)))


def locate(url: str) -> tuple[HubLocation, str]:
    """Return the directory of a URL, and the name of a file or an index in it that the URL names, or "".

    Raises:
        CheckpointNotFoundError: It names no repository of models.
    """
    found = _URL.fullmatch(url)
    first = url[len("hf://") :].partition("/")[0].lower()
    path = without_secrets(url)
    key = ((found and found["key"]) or "").strip("/")
    # A password or a query: the hub has none, and no message may show it.
    is_wrong = found is None or path != url or first in _OTHER_TYPES or not key.isprintable()
    if found is None or is_wrong or (key and any(part in ("", ".", "..") for part in key.split("/"))):
        raise CheckpointNotFoundError(
            "a URL of the hub names a repository of models, and not of datasets: hf://owner/name, or "
            "hf://owner/name@revision/path",
            path=path,
        )
    folder, name = key, ""
    if FileName(key).is_checkpoint:
        folder, _, name = key.rpartition("/")
    revision = unquote(found["revision"]) if found["revision"] else None
    return HubLocation(found["repository"], revision, folder), name


def open_url(url: str, *, is_file: bool | None = None) -> tuple[HubRoot, str]:
    """Return the directory of a URL, and a name; see `stio.storage.open.open_url`.

    Raises:
        FormatError: It names a file of torch.save, which would be downloaded in full to be refused.
    """
    location, name = locate(url)
    if FileName(location.folder).whole.endswith(PICKLE_SUFFIXES) and not url.endswith("/"):
        path = without_secrets(url)
        raise FormatError(
            "files of torch.save are not read from the hub; download and convert it (stio.convert)", path=path
        )
    return HubRoot(location), name


def place_of_url(url: str) -> str:
    """Return the directory of the hub's cache that has all files of a URL's repository."""
    constants: Any = import_module("huggingface_hub.constants")
    name = "--".join(["models", *locate(url)[0].repository.split("/")])
    return os.path.join(os.path.realpath(constants.HF_HUB_CACHE), name)


class HubRoot:
    """A directory of a repository, in the state of one commit; a `Root`.

    Args:
        location: The directory.

    Raises:
        ImportError: huggingface_hub is not installed.
    """

    def __init__(self, location: HubLocation) -> None:
        try:
            self._hub: Any = import_module("huggingface_hub")
            self._constants: Any = import_module("huggingface_hub.constants")
        except ImportError as error:
            raise ImportError(f"hf:// needs huggingface_hub: {install_command('hub')}; {error}") from error
        self._location = location
        self.path = location.shown(location.revision)
        """The URL, with the commit as soon as that is known."""
        self._commit = ""
        self._has_ref = False
        """Whether the cache records the commit of the revision: the hub's package writes that with a download."""
        self._files: frozenset[str] | None = None
        """All files of the commit; None before the hub has listed them."""
        self._is_unreachable = False
        """Whether the hub did not answer, or may not be contacted: the cache may have what is needed."""

    def listdir(self) -> list[str]:
        """Return the names of the files of the directory, sorted.

        Without the hub (`HF_HUB_OFFLINE`, or no connection), and for a commit that is in the cache, these may be only
        the files in the cache. One of them must be the checkpoint then, whatever else the repository has.

        Raises:
            CheckpointNotFoundError: There is no such repository or revision, or it cannot be seen; or the hub is not
                contacted, and the cache does not show which file is the checkpoint.
            StorageError: The hub refuses, or cannot be reached.
        """
        self.resolve()
        if self._files is None:
            cached = self._inside(self._cached_files())
            if any(name in cached for name in _CHECKPOINTS):
                return cached
            _, self._files = self._listed(self._commit)  # a file that is alone in the cache may be one of several
        return self._inside(self._files or ())

    def resolve(self) -> str:
        """Return the URL with the commit, which names this state of the directory. A full commit needs no request.

        Raises:
            CheckpointNotFoundError: There is no such repository or revision, or it cannot be seen.
            StorageError: The hub refuses, or cannot be reached, and the cache does not have the revision.
        """
        location = self._location
        if not self._commit and _COMMIT.fullmatch(location.revision or ""):
            self._commit, self._has_ref = str(location.revision), True
        if not self._commit:
            cached = self._cached_commit()
            try:
                self._commit, self._files = self._listed(location.revision)
            except StioError as error:
                if not (cached and self._is_unreachable):
                    raise
                self._commit = cached
                level = logging.INFO if self._constants.HF_HUB_OFFLINE else logging.WARNING
                log(level, "%s; commit %s is in the cache, and is used", error, cached)
            self._has_ref = cached == self._commit
            self.path = location.shown(self._commit)
        return self.path

    def list_all(self) -> list[str]:
        """Return the names of all files of the directory, as the hub lists them, sorted; raises what `listdir` does."""
        self.resolve()
        if self._files is None:
            _, self._files = self._listed(self._commit)
        return self.listdir()

    def open_ahead(self, names: Sequence[str]) -> None:
        """Download files at one time, which `open` then finds in the cache. Blocks.

        The first error of a file ends all downloads; `open` raises it.

        Raises:
            CheckpointNotFoundError: The repository does not have all files; none is downloaded.
        """
        self.resolve()
        left = list(dict.fromkeys(names))
        for name in left:
            self._require(name)
        with suppress(StioError):
            for_each(left, self._download, "download", _NUM_DOWNLOADS)

    def open(self, name: str, *, trusted: bool = False) -> Source:
        """Open one file; download it if it is not in the cache.

        Args:
            name: Name of the file in the directory.
            trusted: Has no meaning here: the cache's own links are followed.

        Raises:
            CheckpointNotFoundError: The repository has no such file.
            StorageError: The hub refuses, or cannot be reached, or the cache cannot be written; ENOENT: the cache does
                not have the file, and the hub is not contacted.
        """
        self.resolve()
        self._require(name)
        return open_file(self._download(name))

    def at(self, path: str, *, up: int) -> HubRoot:
        """Return another directory of the same commit; see `RootInTree`."""
        self.resolve()
        folder = key_at(self._location.folder, path, up, shown=self.path)
        root = HubRoot(replace(self._location, folder=folder, revision=self._commit))
        root._files = self._files
        return root

    def close(self) -> None:
        """Do nothing: files that were opened can still be read."""

    def _listed(self, revision: str | None) -> tuple[str, frozenset[str]]:
        """Return the commit of a revision, and its files, as the hub lists them."""
        info = self._call(lambda: self._hub.HfApi().model_info(self._location.repository, revision=revision))
        return info.sha, frozenset(file.rfilename for file in info.siblings or ())

    def _inside(self, files: Iterable[str]) -> list[str]:
        """Return the names of the files of the directory among those of the repository."""
        prefix = self._key("")
        inside = (name[len(prefix) :] for name in files if name.startswith(prefix))
        return sorted(name for name in inside if "/" not in name)

    def _key(self, name: str) -> str:
        """Return the path of a file in the repository."""
        return f"{self._location.folder}/{name}" if self._location.folder else name

    def _require(self, name: str) -> None:
        """Refuse a file that the repository does not have, if the hub has listed the files."""
        if self._files is not None and self._key(name) not in self._files:
            raise CheckpointNotFoundError("the repository has no such file", path=f"{self.path}/{name}")

    def _cached_commit(self) -> str:
        """Return the commit that the cache has for the branch or tag; "" without one."""
        revision = self._location.revision or "main"
        place = os.path.join(place_of_url(self._location.shown(None)), "refs", *revision.split("/"))
        try:
            with open(place, encoding="ascii") as file:
                commit = file.read().strip()
        except (OSError, ValueError):
            return ""
        return commit if _COMMIT.fullmatch(commit) else ""

    def _cached_commits(self) -> str:
        """Return a clause with the URLs of the commits that the cache has, "" without any."""
        commits: list[str] = []
        with suppress(OSError):
            names = os.listdir(os.path.join(place_of_url(self._location.shown(None)), "snapshots"))
            commits = sorted(filter(_COMMIT.fullmatch, names))
        shown = " and ".join(map(self._location.shown, commits))
        commit = self._commit or self._cached_commit()
        if not shown or commit in commits:
            return ""
        why = f"has no files of {commit}" if commit else "does not say which commit that is"
        return f"; the cache {why}; it has {shown}"

    def _cached_files(self) -> list[str]:
        """Return the files of the commit that are in the cache."""
        snapshot = os.path.join(place_of_url(self._location.shown(None)), "snapshots", self._commit)
        return [
            os.path.relpath(os.path.join(place, name), snapshot).replace(os.sep, "/")
            for place, _, files in os.walk(snapshot)
            for name in files
        ]

    def _download(self, name: str) -> str:
        """Return the path of a file in the cache."""
        download: Callable[..., str] = partial(
            self._hub.hf_hub_download, self._location.repository, self._key(name), library_name="stio"
        )
        if not self._has_ref:
            path = self._call(partial(download, revision=self._location.revision), name)
            self._has_ref = True
            if self._commit in path.split(os.sep):
                return path  # otherwise the branch has another commit by now
        return self._call(partial(download, revision=self._commit), name)

    def _call(self, work: Callable[[], T], name: str = "") -> T:
        """Call a function of the hub. A cancel leaves it behind; a download then goes on in the cache.

        Raises:
            Cancelled: The calling thread should end.
            StioError: It failed.
        """
        path = f"{self.path}/{name}" if name else self.path
        try:
            return calls.Call(work).result()
        except Exception as error:
            raise self._error(error, path, name) from error

    def _error(self, error: Exception, path: str, name: str) -> StioError:
        """Return what an error of the hub means. Errors that it does not raise are raised again."""
        kinds = {kind.__name__ for kind in type(error).__mro__}
        reason: BaseException = error
        is_local = "LocalEntryNotFoundError" in kinds
        if is_local and error.__cause__ is not None:
            reason = error.__cause__  # what happened; the error adds that the cache has no such file either
            kinds |= {kind.__name__ for kind in type(reason).__mro__}
        if "GatedRepoError" in kinds:
            page = f"{self._constants.ENDPOINT}/{self._location.repository}"
            words = f"the repository is gated; request access on {page}, and log in by `hf auth login`, or set HF_TOKEN"
            return StorageError(words, path=path, errno=EACCES)
        if "OfflineModeIsEnabled" in kinds or (is_local and self._constants.HF_HUB_OFFLINE):
            words, remedy = "the hub is not contacted (HF_HUB_OFFLINE is set)", "; load it once with the hub"
            if name:
                words = f"{words}, and its cache does not have the file{remedy}{self._cached_commits()}"
                return StorageError(words, path=path, errno=ENOENT)
            self._is_unreachable = True
            words = f"{words}, and its cache does not show the checkpoint{remedy}, or give the URL of the file"
            return CheckpointNotFoundError(words + self._cached_commits(), path=path)
        for kind, message in _MISSING.items():
            if kind in kinds and not (is_local and kind == "EntryNotFoundError"):
                return CheckpointNotFoundError(message, path=path)
        text, status = _text_of(reason), getattr(getattr(reason, "response", None), "status_code", 0)
        is_refused = 400 <= status < 500 and status not in (408, 429)
        if kinds & _UNREACHABLE and not is_refused:
            self._is_unreachable = True
            words = f"the hub cannot be reached, or did not answer; check network, proxy and HF_ENDPOINT: {text}"
            return StorageError(words + self._cached_commits(), path=path, errno=EHOSTUNREACH)
        # Its parts that are not Python raise RuntimeError.
        if not ("InvalidURL" in kinds or isinstance(error, OSError | RuntimeError | ValueError)):
            raise error
        words = (
            "the hub refused the request, or its answer cannot be used or stored; check HF_TOKEN, HF_ENDPOINT, proxy"
        )
        number = EACCES if status in (401, 403) else getattr(error, "errno", None) or EIO
        return StorageError(f"{words}, and space and permissions of HF_HOME: {text}", path=path, errno=number)
