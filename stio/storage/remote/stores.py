"""Stores by URL: which object it names, and a connection with the credentials that the environment gives.

Credentials and endpoints are found as the providers' own tools find them. obstore supports most of that: `AWS_*`,
`AZURE_*` and `GOOGLE_*` variables, and the metadata service of a cloud machine. This module adds the rest: profiles of
AWS, connection strings of Azure, the variables for certificates, users in URLs, and plain http where an endpoint has
it. Of a pod or a task of AWS it gets the credentials itself: obstore sends the content of a token file as it stands,
with the newline that a file of a secret ends in, speaks to STS by https only, and does not read
`AWS_CONTAINER_AUTHORIZATION_TOKEN`.
"""

from __future__ import annotations

import base64
import configparser
import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit, urlunsplit
from xml.etree import ElementTree

from stio.errors import CheckpointNotFoundError, StorageError, install_command, listed, one_line
from stio.runtime.operation import without_panic
from stio.runtime.text import without_secrets
from stio.storage.remote.failures import RefusedError, RequestError, failure_of
from stio.storage.remote.requests import STALL_SECONDS, ask
from stio.storage.remote.settings import (
    Options,
    added_authorities,
    bare,
    checked,
    is_true,
    maker_of,
    set_variables,
    usable,
    variable,
    without_values,
)

_CONNECT_SECONDS = 10
_SIGNED_SECONDS = 900  # used at once; clocks differ, and S3 allows as much
_MOST_RETRIES = 1000
_REQUEST_SECONDS = 600  # a bound for a server that sends a byte now and then

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a store."""

    scheme: str
    """Scheme of the URL, in lower case."""
    store: str
    """What one connection serves: bucket or container; for http the URL of the server, with user and query."""
    key: str
    """Path in the store, without slashes at its ends, as the store names it (not percent-encoded)."""

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        base = without_secrets(self.store) if "://" in self.store else f"{self.scheme}://{self.store}"
        return f"{base.rstrip('/')}/{self.key}" if self.key else base

    def __repr__(self) -> str:
        return f"<Location {self.shown}>"  # the generated one would show the secrets


def locate(url: str) -> Location:
    """Take a URL apart.

    Raises:
        CheckpointNotFoundError: It names no bucket, container or host.
        StorageError: No bucket has such a name, or the URL has a signature or the id of a version.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme not in ("http", "https", "s3", "gs", "az"):
        raise CheckpointNotFoundError(
            "stio does not read or write URLs of this scheme",
            path=without_secrets(url),
            requested=scheme,
            expected="s3, gs, az, http, https or hf",
        )
    if scheme in ("http", "https"):
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port  # raises for a wrong port
        except ValueError:  # its text may hold a part of the password
            host = None
        if not host or set(host) & set(' "%<>\\^`{|}'):
            raise CheckpointNotFoundError(
                "this is no URL: host or port is wrong; a user and a password are percent-encoded", path=_hidden(url)
            )
        return Location(
            scheme, urlunsplit((scheme, parts.netloc, "/", parts.query, "")), unquote(parts.path).strip("/")
        )
    bucket, _, key = rest.partition("/")
    if not bucket:
        what = "container" if scheme == "az" else "bucket"
        raise CheckpointNotFoundError(f"the URL names no {what}", path=without_secrets(url))
    if not _BUCKET.fullmatch(bucket) or _SIGNATURE.search(key):
        what = "container" if scheme == "az" else "bucket"
        raise StorageError(
            f"no {what} has such a name, or the URL has a signature; credentials come from the environment, and a "
            "signed URL begins with https://",
            path=_hidden(url),
            errno=errno.EINVAL,
        )
    if scheme == "s3" and _VERSION.search(key):
        raise StorageError(
            "stio reads the newest version of an object only; `boto3.client('s3').download_file(BUCKET, KEY, FILE, "
            "{'VersionId': ID})` downloads another one",
            path=without_secrets(url),
            errno=errno.EINVAL,
        )
    return Location(scheme, bucket, key.strip("/"))


_BUCKET = re.compile(r"[A-Za-z0-9._$-]+|arn:[!-~]+")
_VERSION = re.compile(r"\?(.*&)?versionId=", re.IGNORECASE | re.DOTALL)
_SIGNATURE = re.compile(r"\?(.*&)?(sig|signature|x-amz-signature|x-goog-signature)=", re.IGNORECASE | re.DOTALL)


def _hidden(url: str) -> str:
    """Return a malformed URL as it may be shown: without all that may be a user, whose password may have a slash."""
    scheme, _, rest = without_secrets(url).partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def require_obstore() -> Any:
    """Return the package.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return import_module("obstore")
    except ImportError as error:
        raise ImportError(f"URLs are read by obstore: {install_command('remote')}; {error}") from error


def new_store(
    location: Location,
    *,
    stall_seconds: float = STALL_SECONDS,
    config: Options | None = None,
    client_options: Options | None = None,
    credential_provider: Callable[[], Any] | None = None,
    num_retries: int = 0,
    retry_seconds: float = 0.0,
) -> Any:
    """Connect to the store of a location; sends nothing.

    Args:
        location: The place.
        stall_seconds: See `STALL_SECONDS`.
        config: Settings of obstore for this kind of store; they go before those of the environment.
        client_options: Settings of obstore's client: timeouts, headers, certificates, proxies.
        credential_provider: A credential provider of obstore.
        num_retries: How often obstore repeats a request. Those of loads are repeated by
            `stio.storage.remote.requests`, which a cancel interrupts.
        retry_seconds: For so long obstore repeats a request, however often; 0: it has no influence.

    Raises:
        ImportError: obstore is not installed.
        StorageError: The settings do not make a store.
    """
    require_obstore()
    exceptions: Any = import_module("obstore.exceptions")
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=stall_seconds),
        "timeout": timedelta(seconds=max(_REQUEST_SECONDS, 2 * stall_seconds)),
    }
    retries: dict[str, Any] = {"max_retries": num_retries}
    if num_retries and retry_seconds:
        pauses = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2}
        retries = {"max_retries": _MOST_RETRIES, "retry_timeout": timedelta(seconds=retry_seconds), "backoff": pauses}
    try:
        if location.scheme in ("http", "https"):
            target = without_user(location.store)
            if authorization := authorization_of(location.store):
                client["default_headers"] = {"authorization": authorization}
            client["allow_http"] = location.scheme == "http"
            settings: dict[str, Any] = {}
        else:
            target = location.store
            found, credential_provider = _settings(location, config or {}, credential_provider)
            client["allow_http"] = _endpoint(location.scheme, found).startswith("http://")
            settings = {"config": found} if found else {}
            if credential_provider is not None:
                settings["credential_provider"] = credential_provider
        if not client["allow_http"]:
            client |= added_authorities(location.scheme)
        return maker_of(location.scheme)(
            target,
            client_options=client | dict(client_options or {}),
            retry_config=retries,
            **settings,
        )
    except (exceptions.BaseError, ValueError, TypeError) as error:
        reason = without_values(location.scheme, str(error), config or {}).partition("\n")[0].rstrip(".")
        names = set_variables(location.scheme)
        advice = f"; these variables are set: {listed(names)}" if names else ""
        if "Account must be specified" in reason:
            advice = "; set AZURE_STORAGE_ACCOUNT_NAME"
        raise StorageError(f"the settings for this store are wrong: {reason}{advice}", path=location.shown) from None
    except BaseException as error:
        raise without_panic(error) from None


def _settings(
    location: Location, config: Options, credential_provider: Callable[[], Any] | None
) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """Return the settings of a store by those of the caller and of the environment, and a credential provider."""
    settings: dict[str, Any] = {}
    if location.scheme == "s3" and credential_provider is None:
        settings, credential_provider = _aws_profile(config)
    elif location.scheme == "az":
        settings = _azure_connection()
    settings |= config
    if location.scheme == "s3":
        if endpoint := _given_endpoint(settings) or _aws_endpoint(location, settings):
            # AWS_ENDPOINT_URL_S3 of the environment would go before the other names of this setting.
            names = [name for name in settings if name.lower().endswith("endpoint_url_s3")]
            settings[names[0] if names else "aws_endpoint_url_s3"] = endpoint
        if credential_provider is None and not {bare(name) for name in settings} & {"access_key_id", "skip_signature"}:
            credential_provider = _aws_credentials(location)
    return checked(location.scheme, settings, location.shown), credential_provider


def without_user(url: str) -> str:
    """Return a URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def authorization_of(url: str) -> str:
    """Return the header that sends user and password of a URL; empty if it has none."""
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    if not at:
        return ""
    name, _, password = user.partition(":")
    return "Basic " + base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()


def signed_url(connect: Callable[..., Any], config: Options, method: str, path: str, query: Query) -> str:
    """Return a signed URL of S3 for a request that has a query, which obstore does not sign.

    The bucket's own URL, the path and the query become the endpoint of a store, to which obstore adds the name of an
    object. That name is the value of a parameter here that S3 ignores, as all that begin with `x-`.

    Args:
        connect: Makes a store; see `new_store`.
        config: Its settings.
        method: Method of the request.
        path: Path of an object in the bucket, percent-encoded, with a slash before it; "": the bucket.
        query: Parameters of the request.
    """
    sign, valid = require_obstore().sign, timedelta(seconds=_SIGNED_SECONDS)
    bucket = sign(connect(), method, "-", valid).partition("?")[0].removesuffix("/-")
    endpoint = f"{bucket}{path}?{urlencode({**query, 'x-stio': ''}, quote_via=quote)}"
    names = ("endpoint", "endpoint_url", "endpoint_url_s3", "virtual_hosted_style_request")
    others = {key: value for key, value in config.items() if str(key).lower().removeprefix("aws_") not in names}
    here = {"aws_endpoint_url_s3": endpoint, "virtual_hosted_style_request": "true"}
    url: str = sign(connect(config=others | here), method, "-", valid)
    return url


def link_to(store: Any, location: Location) -> str:
    """Return a URL of http at which an object can be read. For objects of S3 it is signed, and gives access to them.

    Raises:
        Exception: obstore cannot sign it.
    """
    if location.scheme == "s3":
        url: str = require_obstore().sign(store, "GET", location.key, timedelta(seconds=_SIGNED_SECONDS))
        return url
    parts = urlsplit(location.store)
    return urlunsplit(parts._replace(path="/" + quote(location.key, safe="/:@!$&'()*+,;=~")))


def _given_endpoint(settings: Options) -> str:
    given = {bare(key): value for key, value in settings.items()}
    names = ("endpoint_url_s3", "endpoint", "endpoint_url", "storage_endpoint", "base_url")
    return str(next((given[name] for name in names if given.get(name)), ""))


def _endpoint(scheme: str, settings: Options) -> str:
    names = {"s3": _AWS_ENDPOINTS, "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"), "gs": ("GOOGLE_BASE_URL",)}
    found = filter(None, map(variable, names.get(scheme, ())))
    return str(_given_endpoint(settings) or next(found, ""))


# AWS.

_AWS_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _aws_endpoint(location: Location, settings: Options) -> str:
    """Return the endpoint that the environment gives, as the tools of AWS read it; "": none."""
    if found := next(filter(None, map(variable, _AWS_ENDPOINTS)), ""):
        return found
    if not any(name in os.environ for name in _AWS_ENDPOINTS):
        return ""
    # Set and empty means that it is not set, which obstore does not know.
    given = {bare(name): value for name, value in settings.items()}
    region = given.get("region") or variable("AWS_REGION") or variable("AWS_DEFAULT_REGION") or "us-east-1"
    virtual = str(given.get("virtual_hosted_style_request") or variable("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"))
    bucket = f"{location.store}." if is_true(virtual) else ""
    return f"https://{bucket}s3.{region}.amazonaws.com"


def _aws_credentials(location: Location) -> Callable[[], Any] | None:
    """Return a provider for credentials of the environment that obstore would misread; None: it finds them itself.

    Raises:
        StorageError: A key is set and empty, and nothing else gives credentials.
    """
    if is_true(variable("AWS_SKIP_SIGNATURE")):
        return None
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    empty = [name for name in names if name in os.environ and not variable(name)]
    keys = {name: variable(name) for name in names}
    if all(keys.values()):
        # A token that is set and empty means that there is none.
        tokens = [name for name in ("AWS_SESSION_TOKEN", "AWS_TOKEN") if name in os.environ]
        if not tokens or any(map(variable, tokens)):
            return None
        return lambda: {
            "access_key_id": keys[names[0]],
            "secret_access_key": keys[names[1]],
            "token": None,
            "expires_at": None,
        }
    if not any(keys.values()) and (provider := pod_credentials(location.shown)) is not None:
        return provider
    if empty:
        raise StorageError(
            f"{' and '.join(empty)} is set and empty; set a value, or unset it", path=location.shown, errno=errno.EINVAL
        )
    return None


def _aws_profile(config: Options) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """Return settings and a credential provider from the files of the AWS tools, which obstore does not read.

    Keys in the environment go before those of a profile, unless `AWS_PROFILE` names one; so do those of a web identity
    and of a container, which obstore finds itself.
    """
    given = {bare(key) for key in config}
    environment = (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )
    named = variable("AWS_PROFILE") or variable("AWS_DEFAULT_PROFILE")
    has_keys = bool(variable("AWS_ACCESS_KEY_ID"))
    if given & {"access_key_id", "skip_signature"} or is_true(variable("AWS_SKIP_SIGNATURE")):
        return {}, None
    values = _profile_values(named or "default")
    settings: dict[str, Any] = {}
    if "region" in values and not (variable("AWS_REGION") or variable("AWS_DEFAULT_REGION")):
        settings["region"] = values["region"]
    if "endpoint_url" in values and not _endpoint("s3", {}):
        settings["endpoint"] = values["endpoint_url"]
    if has_keys or (not named and any(map(variable, environment))):
        return settings, None
    if "aws_access_key_id" in values and "aws_secret_access_key" in values:
        settings["access_key_id"] = values["aws_access_key_id"]
        settings["secret_access_key"] = values["aws_secret_access_key"]
        if "aws_session_token" in values:
            settings["session_token"] = values["aws_session_token"]
        return settings, None
    if not named and not values:
        return settings, None
    return settings, _boto3_provider(named)


def _profile_values(name: str) -> dict[str, str]:
    """Return what the two files of the AWS tools say about a profile; the one with credentials goes first."""
    home = Path(os.path.expanduser("~")) / ".aws"
    values: dict[str, str] = {}
    for name_of_file, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(variable(name_of_file) or home / file, encoding="utf-8")
            if parser.has_section(section):
                values |= dict(parser.items(section))
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # boto3 says what is wrong with it, if it is needed
    return values


def _boto3_provider(profile: str | None) -> Callable[[], Any] | None:
    """Return the provider for a profile without keys of its own (single sign-on, a role, a process)."""
    try:
        session = import_module("boto3").Session(profile_name=profile)
        provider: Callable[[], Any] = import_module("obstore.auth.boto3").Boto3CredentialProvider(session=session)
        return provider
    except Exception as error:  # no boto3; or botocore's own classes: no such profile, no credentials
        if profile is None:
            return None
        raise StorageError(
            f"the AWS profile {profile!r} has no keys of its own, and boto3, which gets them (pip install boto3), has "
            f"none: {error}"
        ) from None


# Azure.


def _azure_connection() -> dict[str, Any]:
    """Return settings from the variables of the Azure tools that obstore does not read."""
    settings: dict[str, Any] = {}
    text = variable("AZURE_STORAGE_CONNECTION_STRING")
    parts = dict(part.partition("=")[::2] for part in text.split(";") if "=" in part)
    if parts.get("UseDevelopmentStorage", "").lower() == "true":
        return {"use_emulator": True}
    for name, key in (
        ("AccountName", "account_name"),
        ("AccountKey", "account_key"),
        ("SharedAccessSignature", "sas_token"),
        ("BlobEndpoint", "endpoint"),
    ):
        if parts.get(name):
            settings[key] = parts[name]
    for name, key in (("AZURE_STORAGE_ACCOUNT", "account_name"), ("AZURE_STORAGE_KEY", "account_key")):
        if variable(name) and not text:
            settings[key] = variable(name)
    return settings


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
    return _credentials("AWS_WEB_IDENTITY_TOKEN_FILE", fields, token="SessionToken")


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
    return _credentials(name, fields if isinstance(fields, dict) else {}, token="Token")


def _credentials(name: str, fields: Mapping[str, Any], *, token: str) -> Mapping[str, Any]:
    """Return what obstore takes, of the fields of an answer."""
    names = ("AccessKeyId", "SecretAccessKey", token, "Expiration")
    key, secret, session, until = (str(fields.get(one) or "").strip() for one in names)
    try:
        expires = datetime.fromisoformat(until) if until else None
    except ValueError:
        key = ""
    if not key or not secret:
        raise CredentialsError(f"the service of credentials for {name} did not answer with any")
    return {
        "access_key_id": _one_line(key, name),
        "secret_access_key": secret,
        "token": _one_line(session, name) or None,
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
        _, body = ask(
            url,
            {"Authorization": token} if token else {},
            _MOST_BYTES,
            stall_seconds=_SECONDS,
            scheme="s3",
            method="GET" if form is None else "POST",
            data=form,
            is_local=host.startswith("169.254."),
        )
        return body
    except StorageError as error:  # the certificates cannot be read
        raise CredentialsError(str(error)) from None
    except (RefusedError, RequestError) as error:
        found = failure_of(error)
        kind = BusyCredentialsError if found.may_have_worked else CredentialsError
        raise kind(f"{host} gives no credentials for {name}: {one_line(found.cause)}".rstrip(": ")) from None
