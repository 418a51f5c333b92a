"""Stores by URL: which object a URL names, and a connection to its store.

obstore finds credentials and endpoints itself: by `AWS_*`, `AZURE_*` and `GOOGLE_*` variables, by the web identity or
the container of a pod, or by the metadata service of a cloud machine. This module adds profiles of AWS (by boto3), the
variables for certificates, and plain http where an endpoint has it. Its errors name variables and show no values.
"""

from __future__ import annotations

import base64
import errno
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from stio.errors import CheckpointNotFoundError, StorageError, install_command, listed, one_line
from stio.runtime import without_panic
from stio.storage import refusals
from stio.text import without_secrets

STALL_SECONDS = 30.0
"""Longest time without a byte before a request counts as failed."""

_CONNECT_SECONDS = 10
_REQUEST_SECONDS = 600  # a bound for a server that sends a byte now and then

Options = Mapping[str, Any]


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

    def below(self, name: str) -> Location:
        """Return the place of an object in this directory."""
        return replace(self, key=f"{self.key}/{name}" if self.key else name)

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
    what = "container" if scheme == "az" else "bucket"
    if not bucket:
        raise CheckpointNotFoundError(f"the URL names no {what}", path=without_secrets(url))
    if not _BUCKET.fullmatch(bucket) or _SIGNATURE.search(key):
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
    retry_config: Options | None = None,
) -> Any:
    """Connect to the store of a location; sends nothing.

    Args:
        location: The place.
        stall_seconds: See `STALL_SECONDS`.
        config: Settings of obstore for this kind of store; they override those of the environment.
        client_options: Settings of obstore's client: timeouts, headers, certificates, proxies.
        credential_provider: A credential provider of obstore.
        retry_config: How obstore repeats requests. None: not at all. `stio.remote.requests` repeats those of
            loads, so that a cancel interrupts them.

    Raises:
        ImportError: obstore is not installed, or boto3 for a profile of AWS.
        StorageError: The settings do not make a store.
    """
    require_obstore()
    stores: Any = import_module("obstore.store")
    exceptions: Any = import_module("obstore.exceptions")
    _require_clean(location)
    settings: dict[str, Any] = {"retry_config": retry_config or {"max_retries": 0}}
    target, headers = location.store, {}
    if location.scheme in ("http", "https"):  # obstore does not send user and password of a URL
        parts = urlsplit(target)
        target = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers = {"authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}
    new = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}.get(location.scheme)
    values = dict(config or {})
    if new is not None:
        if location.scheme == "s3":
            # AWS_ENDPOINT_URL_S3 of the environment would override the other names of this setting.
            values = {_S3_ENDPOINT if _ENDPOINT.fullmatch(name) else name: value for name, value in values.items()}
            credential_provider = credential_provider or _add_profile(location, values)
        settings |= {"config": values, "credential_provider": credential_provider}
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=stall_seconds),
        "timeout": timedelta(seconds=max(_REQUEST_SECONDS, 2 * stall_seconds)),
        "allow_http": any(url.lower().startswith("http://") for url in _endpoints(location, values)),
    }
    if not client["allow_http"]:
        client |= _added_authorities(location.scheme)
    own = client_options or {}
    settings["client_options"] = client | {**own, "default_headers": headers | dict(own.get("default_headers") or {})}
    try:
        return (new or stores.HTTPStore.from_url)(target, **settings)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        reason = _without_values(location.scheme, str(error), values).partition("\n")[0].rstrip(".")
        names = set_variables(location.scheme)
        advice = f"; these variables are set: {listed(names)}" if names else ""
        if "Account must be specified" in reason:
            advice = "; set AZURE_STORAGE_ACCOUNT_NAME"
        raise StorageError(f"the settings for this store are wrong: {reason}{advice}", path=location.shown) from None
    except BaseException as error:
        raise without_panic(error) from None


# The environment.

_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_ENDPOINT = re.compile(r"(aws_|azure_|google_)?(storage_)?(endpoint(_url)?(_s3)?|base_url)", re.IGNORECASE)
_S3_ENDPOINT = "aws_endpoint_url_s3"
_QUOTED = re.compile(r"(?<=invalid type: )[a-z ]+ [\"`].*[\"`]")
"""What obstore shows of a file of secrets that it cannot parse."""


def set_variables(scheme: str) -> list[str]:
    """Return the names of the variables that are set for a kind of store, sorted."""
    prefix = _PREFIXES.get(scheme)
    return sorted(name for name in os.environ if prefix and name.startswith(prefix))


def _require_clean(location: Location) -> None:
    """Require that no variable ends in a newline, as the content of a file does: obstore would use it as it is.

    Raises:
        StorageError: One does, or has a control character; its value is not shown.
    """
    for name in set_variables(location.scheme):
        value = os.environ[name]
        if (value != value.strip() or not value.isprintable()) and not value.startswith("{"):  # JSON may
            raise StorageError(
                f"{name} has white space at an end, such as the newline of a file, or a control character; correct it, "
                "or unset it",
                path=location.shown,
                errno=errno.EINVAL,
            )


def _endpoints(location: Location, config: Options) -> list[str]:
    """Return the URLs of the store that the settings name, or else those of the environment."""
    if location.scheme in ("http", "https"):
        return [location.store]
    urls = [str(value) for name, value in config.items() if _ENDPOINT.fullmatch(name)]
    return urls or [os.environ[name] for name in set_variables(location.scheme) if _ENDPOINT.fullmatch(name)]


def _without_values(scheme: str, reason: str, config: Options) -> str:
    """Return a message of obstore without the values of settings, which may be secrets."""
    for value in (*(os.environ[name] for name in set_variables(scheme)), *map(str, config.values())):
        if len(value) > 3:
            reason = reason.replace(value, "...")
    return _QUOTED.sub("another value", reason)


def _add_profile(location: Location, config: dict[str, Any]) -> Callable[[], Any] | None:
    """Add the region and the endpoint of the AWS profile that the environment names; return its credential provider.

    Keys in the environment or in the settings are used in place of a profile.

    Raises:
        ImportError: boto3 is not installed.
        StorageError: There is no such profile, or it gives no credentials.
    """
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    settings = {str(key).lower().removeprefix("aws_") for key in config}
    if not name or os.environ.get("AWS_ACCESS_KEY_ID") or settings & {"access_key_id", "skip_signature"}:
        return None
    try:
        session = import_module("botocore.session").Session(profile=name)
        provider: Callable[[], Any] = import_module("obstore.auth.boto3").Boto3CredentialProvider(session)
        region, endpoint = session.get_config_variable("region"), session.get_scoped_config().get("endpoint_url")
    except ImportError as error:
        raise ImportError(f"AWS_PROFILE is set, and profiles are read by boto3: pip install boto3; {error}") from error
    except Exception as error:  # botocore's own classes
        raise StorageError(
            f"the AWS profile {name!r} gives no credentials: {one_line(str(error))}",
            path=location.shown,
            errno=errno.EACCES,
        ) from None
    if region and not (settings & {"region", "default_region"} or os.environ.get("AWS_REGION")):
        config["region"] = region
    if endpoint and not _endpoints(location, config):
        config[_S3_ENDPOINT] = endpoint
    return provider


def _added_authorities(scheme: str) -> dict[str, Any]:
    """Return the authorities that the environment adds, under the names that curl, requests and the AWS tools use.

    Raises:
        StorageError: Their file cannot be read.
    """
    names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    for name in ("AWS_CA_BUNDLE", *names) if scheme == "s3" else names:
        path = os.environ.get(name)
        if not path or os.path.isdir(path):  # a directory of many: those of the system are used
            continue
        with refusals(f"reading the certificates of {name}", path):
            return {"root_certificate": Path(path).read_bytes()}
    return {}


def s3_client(location: Location, config: Options) -> Any:
    """Return a client of boto3 for the store of a location, for requests that obstore does not make.

    Raises:
        Exception: boto3 is not installed, or botocore refuses the environment.
    """
    boto3, botocore = import_module("boto3"), import_module("botocore.config")
    endpoint = next(iter(_endpoints(location, config)), None)
    style = {"addressing_style": "path" if endpoint else "auto"}
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=os.environ.get("AWS_REGION"),  # botocore knows only AWS_DEFAULT_REGION
        verify=os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE"),
        config=botocore.Config(s3=style),
    )
