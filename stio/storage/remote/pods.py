"""Credentials of AWS for a pod or a task: a web identity by STS, or the service of the container.

obstore has these too. It sends the content of a token file as it stands, with the newline that a file of a secret ends
in, speaks to STS by https only, and does not read `AWS_CONTAINER_AUTHORIZATION_TOKEN`.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from xml.etree import ElementTree

from stio.errors import StorageError, one_line
from stio.storage.remote.failures import PageError, RefusedError, StalledError, UnansweredError, failure_of
from stio.storage.remote.one_request import ask
from stio.storage.remote.settings import usable, variable

_SECONDS = 10
"""Longest wait for an answer of such a service."""
_MOST_BYTES = 1 << 20
_CONTAINER_ADDRESS = "http://169.254.170.2"

Provider = Callable[[], Mapping[str, Any]]


class CredentialsError(Exception):
    """The service gives no credentials; the text, which has no secret, says why. obstore passes the text on."""


class BusyCredentialsError(CredentialsError):
    """Another attempt may get credentials."""


def pod_credentials(path: str) -> Provider | None:
    """Return the provider that the environment names, in the order of AWS's own tools; None: it names none.

    Args:
        path: URL of the store, for errors.

    Raises:
        StorageError: A variable cannot be used.
    """
    if variable("AWS_WEB_IDENTITY_TOKEN_FILE"):
        if not variable("AWS_ROLE_ARN"):
            raise StorageError(
                "AWS_WEB_IDENTITY_TOKEN_FILE is set without AWS_ROLE_ARN; set that, or unset it",
                path=path,
                errno=errno.EINVAL,
            )
        region = variable("AWS_REGION") or variable("AWS_DEFAULT_REGION") or "us-east-1"
        url = variable("AWS_ENDPOINT_URL_STS") or f"https://sts.{region}.amazonaws.com"
        url = str(usable("endpoint", "AWS_ENDPOINT_URL_STS", url, path))
        return partial(_by_web_identity, url)
    for name, before in (
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", f"{_CONTAINER_ADDRESS}/"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", ""),
    ):
        if uri := variable(name):
            url = f"{before}{uri.removeprefix('/') if before else uri}"
            return partial(_by_container, str(usable("endpoint", name, url, path)), name)
    return None


def _by_web_identity(url: str) -> Mapping[str, Any]:
    form = {
        "Action": "AssumeRoleWithWebIdentity",
        "Version": "2011-06-15",
        "DurationSeconds": "3600",
        "RoleArn": variable("AWS_ROLE_ARN"),
        "RoleSessionName": variable("AWS_ROLE_SESSION_NAME") or "stio",
        "WebIdentityToken": _token("AWS_WEB_IDENTITY_TOKEN_FILE"),
    }
    answer = _answer("AWS_WEB_IDENTITY_TOKEN_FILE", url, form=urlencode(form).encode())
    try:
        found = ElementTree.fromstring(answer).find(".//{*}Credentials")
    except ElementTree.ParseError:
        found = None
    fields = {} if found is None else {one.tag.rpartition("}")[2]: one.text or "" for one in found}
    return _credentials("AWS_WEB_IDENTITY_TOKEN_FILE", fields, key="AccessKeyId", token="SessionToken")


def _by_container(url: str, name: str) -> Mapping[str, Any]:
    token = ""
    if variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        token = _token("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
    elif text := variable("AWS_CONTAINER_AUTHORIZATION_TOKEN"):
        token = _one_line(text, "AWS_CONTAINER_AUTHORIZATION_TOKEN")
    answer = _answer(name, url, token=token)
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError):
        fields = {}
    return _credentials(name, fields if isinstance(fields, dict) else {}, key="AccessKeyId", token="Token")


def _credentials(name: str, fields: Mapping[str, Any], *, key: str, token: str) -> Mapping[str, Any]:
    """Return what obstore takes, of the fields of an answer."""
    values = {one: str(fields.get(one) or "").strip() for one in (key, "SecretAccessKey", token, "Expiration")}
    if not values[key] or not values["SecretAccessKey"]:
        raise CredentialsError(f"the service of credentials for {name} did not answer with any")
    try:
        expires = datetime.fromisoformat(values["Expiration"]) if values["Expiration"] else None
    except ValueError:
        raise CredentialsError(f"the service of credentials for {name} did not say until when they are valid") from None
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    return {
        "access_key_id": _one_line(values[key], name),
        "secret_access_key": values["SecretAccessKey"],
        "token": _one_line(values[token], name) or None,
        "expires_at": expires,
    }


def _token(name: str) -> str:
    """Return the content of the token file that a variable names."""
    try:
        text = Path(variable(name)).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise CredentialsError(f"the file of {name} cannot be read: {reason}") from None
    if not text:
        raise CredentialsError(f"the file of {name} is empty")
    return _one_line(text, name)


def _one_line(text: str, name: str) -> str:
    """Return text that may stand in a header."""
    if not text.isascii() or not text.isprintable():
        raise CredentialsError(f"what {name} gives has a line break or a control character inside")
    return text


def _answer(name: str, url: str, *, token: str = "", form: bytes | None = None) -> bytes:
    host = urlsplit(url).hostname or ""
    try:
        return ask(
            url,
            {"Authorization": token} if token else {},
            _MOST_BYTES,
            stall_seconds=_SECONDS,
            scheme="s3",
            method="GET" if form is None else "POST",
            data=form,
            is_local=host.startswith("169.254."),
        ).body
    except StorageError as error:  # the certificates cannot be read
        raise CredentialsError(str(error)) from None
    except RefusedError as error:
        found = failure_of(error)
        kind = BusyCredentialsError if found.kind == "busy" else CredentialsError
        raise kind(f"{host} refuses credentials for {name} (status {error.status}): {found.cause}") from None
    except (PageError, StalledError, UnansweredError) as error:
        kind = CredentialsError if isinstance(error, PageError) else BusyCredentialsError
        raise kind(f"{host} gives no credentials for {name}: {one_line(str(error))}".rstrip(": ")) from None
