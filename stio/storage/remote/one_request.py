"""One request by Python's own client, whose answer has its whole head.

An error of obstore has a status and a text, but no `Retry-After`, no region of a bucket and no type of the content. So
a request that obstore was refused is repeated by `ask`. It also makes the requests that obstore has no function for.
It follows no redirect, and blocks: callers run it on a thread that a cancel leaves behind.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from stio.storage.remote.answers import RateWatch, require_no_page, retry_after
from stio.storage.remote.failures import RefusedError, StalledError, UnansweredError
from stio.storage.remote.settings import added_authorities

_REGION = re.compile(r"<Region>([\w-]+)</Region>|s3[.-]([a-z]{2,}-[a-z-]+-\d)\.amazonaws")
_PIECE_BYTES = 64 << 10
_MOST_BODY_BYTES = 64 << 10
"""Of the answer of a request that was refused."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an answer, and its body."""

    status: int
    """200 or another success."""
    fields: Mapping[str, str]
    """Its fields, by their names in lower case."""
    body: bytes
    """As many bytes as were asked for; of a status 200 not more than those."""


def ask(
    url: str,
    headers: Mapping[str, str],
    num_bytes: int,
    *,
    stall_seconds: float,
    scheme: str,
    method: str = "GET",
    data: bytes | None = None,
    is_local: bool = False,
) -> Head:
    """Make one request. Blocks, and cannot be interrupted.

    Args:
        url: A URL of http or https, without a user.
        headers: Fields of the request.
        num_bytes: Most bytes of the body to read.
        stall_seconds: Longest time without enough bytes; see `RateWatch`.
        scheme: Scheme of the store, for the authorities of TLS.
        method: Its method.
        data: Body of the request.
        is_local: No proxy is used.

    Raises:
        RefusedError: The status is no success.
        PageError: It is a web page.
        StalledError: The bytes come too slowly.
        UnansweredError: There was no answer, or it ended early.
        StorageError: The authorities of the environment cannot be read.
    """
    handlers: list[Any] = [_NoRedirect(), *([ProxyHandler({})] if is_local else [])]
    if url.lower().startswith("https:"):
        context = ssl.create_default_context()
        if added := added_authorities(scheme):
            context.load_verify_locations(cadata=added["root_certificate"].decode())
        handlers.append(HTTPSHandler(context=context))
    try:
        request = Request(url, data, dict(headers), method=method)
        with build_opener(*handlers).open(request, timeout=stall_seconds) as answer:
            fields = {name.lower(): value for name, value in answer.headers.items()}
            body = _read(answer, num_bytes, stall_seconds)
            require_no_page(fields.get("content-type", ""), body)
            return Head(answer.status, fields, body)
    except HTTPError as error:
        with error:
            raise _refused(error) from None
    except TimeoutError:
        raise StalledError("") from None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise StalledError("") from None
        raise UnansweredError(str(error)) from None


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *values: Any) -> None:
        return None


def _read(answer: Any, num_bytes: int, stall_seconds: float) -> bytes:
    watch, found = RateWatch(stall_seconds), bytearray()
    watch.begin()
    while len(found) < num_bytes:
        data = answer.read1(min(_PIECE_BYTES, num_bytes - len(found)))
        if not data:
            break
        found += data
        watch.add(len(data))
        watch.check()
    return bytes(found)


def _refused(error: HTTPError) -> Exception:
    try:
        body = error.read(_MOST_BODY_BYTES)
    except (OSError, HTTPException):
        body = b""
    text = body.decode(errors="replace")
    region = _REGION.search(text)
    named = error.headers.get("x-amz-bucket-region") or (region and (region[1] or region[2])) or ""
    return RefusedError(
        error.code,
        str(error.reason or ""),
        text,
        retry_after_seconds=retry_after(error.headers.get("Retry-After", "")),
        region=named if re.fullmatch(r"[\w-]{1,40}", named) else "",
    )
