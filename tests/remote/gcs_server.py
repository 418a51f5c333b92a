"""A store that answers like Google Cloud Storage: the part of its XML API that obstore uses, with generations.

Each write of an object gives it a new generation. A write with `x-goog-if-generation-match` happens if the object has
this generation, or if there is no object and the header is 0. It is written after Google's reference of the XML API.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from servers import RunningServer

_TIME = "2026-01-01T00:00:00.000Z"
_LAST_MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"


@dataclass(slots=True)
class Stored:
    data: bytes
    generation: int
    own: dict[str, str]
    """Headers that were stored with it."""

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


@dataclass
class GcsServer:
    """One bucket: its objects by name, and the uploads that were neither completed nor aborted."""

    certificate: tuple[str, str]
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, tuple[dict[str, str], dict[int, bytes]]] = field(default_factory=dict)
    """Headers that are stored with the object, and the parts, by the number of the upload."""
    num_refused: int = 0
    """Writes that were refused by their condition."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self._number = 0
        store = self

        class Handler(_Handler):
            server_store = store

        self.server = RunningServer(Handler, self.certificate)

    @property
    def key(self) -> str:
        """The key of a service account, which tells obstore where the store is, and that it needs no token."""
        where = f"https://127.0.0.1:{self.server.server_port}"
        unused = {"private_key": "", "private_key_id": "", "client_email": ""}
        return json.dumps({"gcs_base_url": where, "disable_oauth": True, **unused})

    def next_number(self) -> int:
        self._number += 1
        return self._number


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_store: GcsServer

    def log_message(self, format: str, *values: object) -> None:
        pass

    def _request(self) -> tuple[str, dict[str, str]]:
        """Return the name of the object, and the query."""
        parts = urlsplit(self.path)
        name = unquote(parts.path).removeprefix("/bucket").removeprefix("/")
        return name, {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name, query = self._request()
        store = self.server_store
        if not name:
            self._answer(200, _listing(store, query.get("prefix", ""), query.get("delimiter", "")))
            return
        with store.lock:
            found = store.objects.get(name)
        if found is None:
            self._answer(404)
            return
        if self.headers.get("If-Match", found.etag) != found.etag:
            self._answer(412)
            return
        headers = {**_state(found), "Last-Modified": _LAST_MODIFIED}
        text = self.headers.get("Range")
        if text is None:
            self._answer(200, found.data, headers)
            return
        first, _, last = text.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(found.data)) + 1, len(found.data))
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(found.data)}"
        self._answer(206, found.data[begin:end], headers)

    def do_PUT(self) -> None:
        name, query = self._request()
        body, store = self._body(), self.server_store
        with store.lock:
            if "partNumber" in query:
                upload = store.uploads.get(query["uploadId"])
                if upload is not None:
                    upload[1][int(query["partNumber"])] = body
                status, headers = (404 if upload is None else 200), {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
            else:
                status, headers = self._write(name, body, self._own())
        self._answer(status, b"", headers)

    def _own(self) -> dict[str, str]:
        return {key: value for key, value in self.headers.items() if key.lower().startswith("x-goog-meta-")}

    def _write(self, name: str, data: bytes, own: dict[str, str]) -> tuple[int, dict[str, str]]:
        store = self.server_store
        wanted = self.headers.get("x-goog-if-generation-match")
        now = store.objects.get(name)
        if wanted is not None and int(wanted) != (0 if now is None else now.generation):
            store.num_refused += 1
            return 412, {}
        stored = store.objects[name] = Stored(data, 1_700_000_000 + store.next_number(), own)
        return 200, _state(stored)

    def do_POST(self) -> None:
        name, query = self._request()
        body, store = self._body(), self.server_store
        with store.lock:
            if "uploads" in query:
                upload_id = f"upload-{store.next_number()}"
                store.uploads[upload_id] = (self._own(), {})
                answer = _xml("InitiateMultipartUploadResult", Bucket="bucket", Key=name, UploadId=upload_id)
                status, headers = 200, {}
            elif query["uploadId"] not in store.uploads:
                answer, status, headers = b"", 404, {}
            else:
                own, parts = store.uploads.pop(query["uploadId"])
                numbers = [int(one.text or 0) for one in ElementTree.fromstring(body).iter() if "PartNumber" in one.tag]
                status, headers = self._write(name, b"".join(parts[number] for number in numbers), own)
                etag = headers.get("ETag", "")
                answer = _xml("CompleteMultipartUploadResult", Bucket="bucket", Key=name, ETag=etag)
        self._answer(status, answer, headers)

    def do_DELETE(self) -> None:
        name, query = self._request()
        store = self.server_store
        with store.lock:
            found = store.uploads.pop(query["uploadId"], None) if "uploadId" in query else store.objects.pop(name, None)
        self._answer(404 if found is None else 204)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _state(stored: Stored) -> dict[str, str]:
    return {"ETag": stored.etag, "x-goog-generation": str(stored.generation), **stored.own}


def _listing(store: GcsServer, prefix: str, delimiter: str) -> bytes:
    with store.lock:
        found = sorted(
            ((name, stored) for name, stored in store.objects.items() if name.startswith(prefix)),
            key=lambda one: one[0],
        )
    rows, folders = [], set()
    for name, stored in found:
        folder, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if cut:
            folders.add(prefix + folder + cut)
            continue
        rows.append(
            f"<Contents><Key>{escape(name)}</Key><Generation>{stored.generation}</Generation>"
            f"<LastModified>{_TIME}</LastModified><ETag>{escape(stored.etag)}</ETag><Size>{len(stored.data)}</Size>"
            "</Contents>"
        )
    rows += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
    return _document("ListBucketResult", "".join(["<IsTruncated>false</IsTruncated><Name>bucket</Name>", *rows]))


def _xml(root: str, **values: str) -> bytes:
    return _document(root, "".join(f"<{key}>{escape(value)}</{key}>" for key, value in values.items()))


def _document(root: str, content: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{root}>{content}</{root}>'.encode()


@contextmanager
def gcs_server(certificate: tuple[str, str]) -> Iterator[GcsServer]:
    """Run the store until the block ends."""
    server = GcsServer(certificate)
    try:
        yield server
    finally:
        server.server.stop()
