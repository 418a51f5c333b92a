"""Settings of stores: their names, what their values may be, and what the environment has of them.

obstore reads the environment itself. It does not strip a value, and does not check it: one that cannot stand in a URL
or in a header ends in a panic. Secrets from files, and variables that are made from them, usually end in a newline. So
values are stripped and checked here, before obstore gets them. An error names the variable, and never shows its value.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stio.errors import StorageError, listed, printable

Options = Mapping[str, Any]

_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}

_FLAGS = ("1", "true", "on", "yes", "y", "0", "false", "off", "no", "n")


def variable(name: str) -> str:
    """Return a variable of the environment, stripped; "": it is not set, or empty."""
    return os.environ.get(name, "").strip()


def set_variables(scheme: str) -> list[str]:
    """Return the names of the variables that are set for a kind of store, sorted."""
    prefix = _PREFIXES.get(scheme)
    return sorted(name for name in os.environ if prefix and name.startswith(prefix))


def without_values(scheme: str, reason: str, config: Options) -> str:
    """Return a message of obstore without the values of settings, which may be secrets; paths of files are shown."""
    values = {one: os.environ[one] for one in set_variables(scheme)} | dict(config)
    for name, value in values.items():
        if isinstance(value, str) and len(value.strip()) > 3 and _KINDS.get(bare(name), _TEXT) is not _FILE:
            reason = reason.replace(value.strip(), "...")
    return _QUOTED.sub("another value", reason)


_QUOTED = re.compile(r"(?<=invalid type: )[a-z ]+ [\"`].*[\"`]")
"""What obstore shows of a file of secrets that it cannot parse."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a value may be."""

    is_valid: Callable[[str], bool]
    expected: str
    """For the error."""
    default: str | None = None
    """Stands for a variable that is set and empty; None: there is none."""


def _is_url(value: str) -> bool:
    if not value.isascii() or not value.isprintable() or set(value) & set(' "<>\\^`{|}'):
        return False
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_object(value: str) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def _matches(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern)
    return lambda value: compiled.fullmatch(value) is not None


def _url(default: str | None = None) -> _Kind:
    return _Kind(_is_url, "a URL that begins with http:// or https://", default)


def _host_part(default: str | None = None) -> _Kind:
    return _Kind(_matches(r"[A-Za-z0-9._-]+"), "letters, digits, '.', '_' and '-'", default)


_TEXT = _Kind(_matches(r"[^\x00-\x1f\x7f]*"), "text without line breaks and control characters")
_KEY = _Kind(_matches(r"[!-~]*"), "letters, digits and punctuation of ASCII")
_BASE64 = _Kind(_matches(r"[A-Za-z0-9+/_-]+={0,2}"), "base64")
_FILE = _Kind(lambda value: _TEXT.is_valid(value) and not value.startswith("{"), "a path of a file")
_FLAG = _Kind(lambda value: value.lower() in _FLAGS, "true or false", "false")

_KINDS = {
    "endpoint": _url(),
    "endpoint_url": _url(),
    "endpoint_url_s3": _url(),
    "base_url": _url(),
    "storage_endpoint": _url(),
    "metadata_endpoint": _url("http://169.254.169.254"),
    "authority_host": _url("https://login.microsoftonline.com"),
    "storage_authority_host": _url("https://login.microsoftonline.com"),
    "msi_endpoint": _url("http://169.254.169.254/metadata/identity/oauth2/token"),
    "identity_endpoint": _url("http://169.254.169.254/metadata/identity/oauth2/token"),
    "region": _host_part("us-east-1"),
    "default_region": _host_part("us-east-1"),
    "account_name": _host_part(),
    "storage_account_name": _host_part(),
    "tenant_id": _host_part(),
    "authority_id": _host_part(),
    "storage_tenant_id": _host_part(),
    "storage_authority_id": _host_part(),
    "account_key": _BASE64,
    "storage_account_key": _BASE64,
    "storage_access_key": _BASE64,
    "storage_master_key": _BASE64,
    "access_key_id": _KEY,
    "session_token": _KEY,
    "token": _KEY,
    "storage_token": _KEY,
    "bearer_token": _KEY,
    "service_account": _FILE,
    "service_account_path": _FILE,
    "application_credentials": _FILE,
    "service_account_key": _Kind(_is_object, "a JSON object"),
    **dict.fromkeys(
        (
            "allow_http", "virtual_hosted_style_request", "skip_signature", "unsigned_payload", "imdsv1_fallback",
            "s3_express", "request_payer", "disable_tagging", "disable_bulk_delete", "sse_bucket_key_enabled",
            "use_emulator", "storage_use_emulator", "use_fabric_endpoint", "use_azure_cli",
        ),
        _FLAG,
    ),
}  # fmt: skip
"""Settings by their names without prefix; all others are text."""

_FOR_NO_KEYS = {
    "s3": (
        {"access_key_id", "skip_signature"},
        {"metadata_endpoint", "container_credentials_relative_uri", "container_credentials_full_uri"},
    ),
    "az": (
        {"account_key", "storage_account_key", "sas_key", "sas_token", "storage_sas_key", "storage_sas_token",
         "token", "storage_token", "skip_signature"},
        {"authority_host", "storage_authority_host", "tenant_id", "authority_id", "storage_tenant_id",
         "storage_authority_id", "msi_endpoint", "identity_endpoint"},
    ),
}  # fmt: skip
"""By kind of store: credentials, and the settings that have no effect if there are any of those."""

_OTHER_NAMES = {
    "s3": ("endpoint_url", "endpoint_url_s3", "token", "disable_bulk_delete"),
    "gs": ("service_account_path", "base_url", "bearer_token"),
    "az": (
        "storage_account_name", "storage_account_key", "storage_access_key", "storage_master_key", "storage_endpoint",
        "storage_sas_key", "storage_sas_token", "sas_token", "storage_token", "storage_use_emulator", "authority_id",
        "storage_authority_host", "storage_tenant_id", "storage_authority_id", "storage_client_id",
        "storage_client_secret", "identity_endpoint",
    ),
}  # fmt: skip
"""Further names under which obstore reads variables."""

_SAME = {"endpoint_url": "endpoint", "endpoint_url_s3": "endpoint", "default_region": "region"}


def bare(name: object) -> str:
    """Return the name of a setting in lower case and without the prefix of its provider."""
    return re.sub("^(aws|google|azure)_", "", str(name).lower())


def checked(scheme: str, given: Options, path: str) -> dict[str, Any]:
    """Return settings for obstore: those given, stripped, and those of the environment that obstore would misread.

    Args:
        scheme: Scheme of the store.
        given: Settings that go before the environment.
        path: URL of the store, for errors.

    Raises:
        StorageError: A value cannot be used; its variable or setting is named, and its value is not shown.
    """
    settings: dict[str, Any] = {}
    for name, value in given.items():
        settings[name] = usable(bare(name), _origin(scheme, name, value), value, path)
    names = {bare(name) for name in given}
    keys, without_keys = _FOR_NO_KEYS.get(scheme, (set[str](), set[str]()))
    found = _in_environment(scheme)
    has_keys = bool(keys & names) or any(found[one][1].strip() for one in keys & found.keys())
    for name, (origin, raw) in found.items():
        kind = _KINDS.get(name, _TEXT)
        if {name, _SAME.get(name, name)} & (names | {_SAME.get(one, one) for one in names}):
            continue  # the value that was given goes before it
        if (has_keys and name in without_keys) or (name == "default_region" and "region" in found):
            continue
        value = raw.strip()
        if not raw and kind.default is None and kind.is_valid is not _is_url:
            continue  # obstore reads it as it reads one that is not set, or says what is missing
        if not value and kind.default is not None:
            value = (name == "region" and variable("AWS_DEFAULT_REGION")) or kind.default
        if name.endswith("authority_host") and "://" not in value:
            value = f"https://{value}"  # the tools of Azure take it so
        if value and usable(name, origin, value, path) == raw:
            continue
        # obstore prefers a region of the environment to a default that it is given here.
        settings["aws_region" if name == "default_region" else origin.lower()] = value
    return settings


def _in_environment(scheme: str) -> dict[str, tuple[str, str]]:
    """Return the variables that obstore reads, by their names without prefix, and their values."""
    known = {*CONFIG_NAMES.get(scheme, ()), *CLIENT_NAMES, *_OTHER_NAMES.get(scheme, ())} - {"bucket", "container_name"}
    found = {bare(name): (name, os.environ[name]) for name in set_variables(scheme) if bare(name) in known}
    more = {"gs": ("SERVICE_ACCOUNT",), "az": ("IDENTITY_ENDPOINT",)}.get(scheme, ())
    return {**found, **{name.lower(): (name, os.environ[name]) for name in more if name in os.environ}}


def usable(name: str, origin: str, value: Any, path: str) -> Any:
    """Return a value of a setting, stripped.

    Args:
        name: Name of the setting, without prefix.
        origin: From where the value is, for the error.
        value: The value.
        path: URL of the store, for the error.

    Raises:
        StorageError: The setting takes no such value.
    """
    if not isinstance(value, str):
        return value
    text, kind = value.strip(), _KINDS.get(name, _TEXT)
    if not kind.is_valid(text):
        raise StorageError(
            f"{origin} cannot be used; correct it, or unset it",
            path=path,
            errno=errno.EINVAL,
            expected=kind.expected,
            found=_described(text, kind),
        )
    return text


def _described(value: str, kind: _Kind) -> str:
    """Return what is wrong with a value, without showing it: it may be a secret."""
    if not value:
        return "an empty value"
    if kind is _FILE and value.startswith("{"):
        return "the content of a file"
    if "\n" in value or "\r" in value:
        return "a line break in the value"
    if not value.isascii() or not value.isprintable():
        return "a control character, or one that is not ASCII"
    if any(one.isspace() for one in value):
        return "a space in the value"
    if kind.is_valid is _is_url and "://" not in value:
        return "a value without http:// and https://"
    return "another value"


def _origin(scheme: str, name: object, value: object) -> str:
    """Return from where a setting is."""
    for one in set_variables(scheme):
        if os.environ[one] == value or (one.endswith("CONNECTION_STRING") and value and str(value) in os.environ[one]):
            return one
    return f"the setting {printable(str(name))!r}"


def advice_on_settings(scheme: str, reason: str, config: Options, client_options: Options) -> str:
    """Return what to do about settings that obstore rejects, by the text of its error; else which variables are set."""
    for argument, given, known, other in (
        ("config", config, CONFIG_NAMES.get(scheme, ()), CLIENT_NAMES),
        ("client_options", client_options, CLIENT_NAMES, CONFIG_NAMES.get(scheme, ())),
    ):
        for name in given:
            # "Configuration key: 'regoin' is not valid for store 'S3'." or "Invalid key: timeot."
            if not re.search(rf"[Kk]ey: '?{re.escape(str(name))}(?![\w-])", reason, re.IGNORECASE):
                continue
            plain = re.sub("^(aws|google|azure(_storage)?)_", "", str(name).lower())
            if plain in other:
                place = "client_options" if argument == "config" else "config"
                return f"; {printable(plain)!r} is a setting for {place}="
            near = difflib.get_close_matches(plain[:_LONGEST_NAME], known, n=3, cutoff=0.5)
            nearest = f"the nearest settings of {argument}= are" if near else f"{argument}= takes"
            return f"; {nearest} {', '.join(near or known)}"
    if scheme == "az" and "Account must be specified" in reason:
        return "; set AZURE_STORAGE_ACCOUNT_NAME"
    names = set_variables(scheme)
    return f"; these variables are set: {listed(names)}" if names else ""


_LONGEST_NAME = 40

CLIENT_NAMES = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "default_headers",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
    "randomize_addresses",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
)
"""Settings of obstore's client, for an error that names the nearest one. obstore itself decides what is valid."""

CONFIG_NAMES = {
    "s3": (
        "access_key_id",
        "secret_access_key",
        "session_token",
        "region",
        "default_region",
        "endpoint",
        "bucket",
        "virtual_hosted_style_request",
        "skip_signature",
        "unsigned_payload",
        "request_payer",
        "checksum_algorithm",
        "conditional_put",
        "imdsv1_fallback",
        "metadata_endpoint",
        "container_credentials_relative_uri",
        "container_credentials_full_uri",
        "container_authorization_token_file",
        "web_identity_token_file",
        "role_arn",
        "role_session_name",
        "s3_express",
        "server_side_encryption",
        "sse_kms_key_id",
        "sse_bucket_key_enabled",
        "sse_customer_key_base64",
        "disable_tagging",
        "copy_if_not_exists",
    ),
    "gs": (
        "service_account",
        "service_account_key",
        "bucket",
        "application_credentials",
        "skip_signature",
    ),
    "az": (
        "account_name",
        "account_key",
        "client_id",
        "client_secret",
        "tenant_id",
        "authority_host",
        "sas_key",
        "token",
        "use_emulator",
        "use_fabric_endpoint",
        "endpoint",
        "msi_endpoint",
        "object_id",
        "msi_resource_id",
        "federated_token_file",
        "use_azure_cli",
        "skip_signature",
        "container_name",
        "disable_tagging",
    ),
}
"""Settings of each kind of store; see `CLIENT_NAMES`."""
