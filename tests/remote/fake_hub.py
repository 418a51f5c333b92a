"""A hub on loopback with the requests that huggingface_hub makes for models: what a repository has, and its files.

Large files are those of weights: as on the hub, a request for one is redirected to a signed URL.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_secret"
SIGNATURE = "a-signature"


@dataclass
class Repository:
    """One repository: its commits, the names of some of them, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False

    def commit(self, files: dict[str, bytes], *refs: str) -> str:
        """Add a commit, which the refs name from now on; return its name."""
        text = f"{len(self.commits)} {sorted(files)}"
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = files
        self.refs |= dict.fromkeys(refs or ("main",), name)
        return name


class FakeHub:
    """The server. `fault` gets each request's method and path, and may return a status to answer with."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        self.gate = threading.Event()
        """The bodies of files are sent when it is set."""
        self.gate.set()
        hub = self

        class Handler(_Handler):
            fake_hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def downloads(self) -> list[str]:
        """Return the names of the files that were sent."""
        kinds = re.compile("GET .*(/resolve/|/signed/)")
        return [line.rpartition("/")[2] for line in self.requests if kinds.match(line)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake_hub: FakeHub

    def log_message(self, format: str, *values: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.fake_hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        status = hub.fault(self.command, path)
        if status:
            self._send(status, b"", {})
            return
        if path.startswith("/signed/"):
            self._body(hub.large[path.split("/")[2]], {})
            return
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        owner, name, what, *rest = [*(parts[2:] if is_api else parts), "", "", ""]
        found = hub.repositories.get(f"{owner}/{name}")
        may_read = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.is_private and not may_read):
            self._send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository Not Found"})
            return
        revision = rest[0] if what in ("revision", "resolve", "tree") else "main"
        if revision == "refs":
            revision, rest = "/".join(rest[:3]), rest[2:]
        commit = found.refs.get(revision, revision)
        files = found.commits.get(commit)
        if files is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        elif is_api:
            siblings = [{"rfilename": file} for file in files]
            info = {"id": f"{owner}/{name}", "sha": commit, "siblings": siblings, "tags": [], "private": False}
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        elif found.is_gated and not may_read:
            self._send(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        else:
            self._file(files.get("/".join(part for part in rest[1:] if part)), commit)

    def _file(self, data: bytes | None, commit: str) -> None:
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if not urlsplit(self.path).path.endswith(".safetensors"):
            self._body(data, headers)
            return
        self.fake_hub.large[digest] = data
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "ETag": '"a pointer"'}
        name = urlsplit(self.path).path.rpartition("/")[2]
        # Another name of this host: the token is not sent along.
        signed = f"http://localhost:{self.server.server_address[1]}/signed/{digest}/{name}?X-Amz-Signature={SIGNATURE}"
        self._send(302, b"", headers | {"Location": signed})

    def _body(self, data: bytes, headers: dict[str, str]) -> None:
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(206 if begin else 200, data[begin:], headers, is_gated=True)

    def _send(self, status: int, body: bytes, headers: dict[str, Any], *, is_gated: bool = False) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(body) > 1 and is_gated:
            self.wfile.write(body[:1])
            self.wfile.flush()
            self.fake_hub.gate.wait()
            body = body[1:]
        self.wfile.write(body)


def go_offline(monkeypatch: pytest.MonkeyPatch, is_offline: bool = True) -> None:
    """Set or clear HF_HUB_OFFLINE in this process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    # The first versions that stio supports keep sessions that do not look at it again.
    getattr(import_module("huggingface_hub.utils"), "reset_sessions", lambda: None)()


def use(url: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Make huggingface_hub ask a hub, with a cache of its own; it reads its environment only when it is imported."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # Its first versions that stio supports have a copy here.
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    go_offline(monkeypatch, False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache.parent / "token"))
    monkeypatch.setenv("HF_ENDPOINT", url)  # for child processes
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a hub until the block ends."""
    hub = FakeHub()
    try:
        yield hub
    finally:
        hub.stop()
