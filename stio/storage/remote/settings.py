"""Settings of stores: their names, what their values may be, and what the environment has of them.

obstore reads the environment itself. It does not strip a value, and does not check it: one that cannot stand in a URL
or in a header ends in a panic. Secrets from files, and variables that are made from them, usually end in a newline. So
values are stripped and checked here, before obstore gets them. An error names the variable, and never shows its value.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from stio.errors import StorageError, printable
from stio.storage.checks import refused

Options = Mapping[str, Any]

_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}

_TRUE = ("1", "true", "on", "yes", "y")


def variable(name: str) -> str:
    """Return a variable of the environment, stripped; "": it is not set, or empty."""
    return os.environ.get(name, "").strip()


def is_true(value: str) -> bool:
    """Return whether a value of a setting means true, as obstore reads it."""
    return value.lower() in _TRUE


def set_variables(scheme: str) -> list[str]:
    """Return the names of the variables that are set for a kind of store, sorted."""
    prefix = _PREFIXES.get(scheme)
    return sorted(name for name in os.environ if prefix and name.startswith(prefix))


def without_values(scheme: str, reason: str, config: Options) -> str:
    """Return a message of obstore without the values of settings, which may be secrets; paths of files are shown."""
    values = {one: os.environ[one] for one in set_variables(scheme)} | dict(config)
    for name, value in values.items():
        if isinstance(value, str) and len(value.strip()) > 3 and _kind_of(bare(name)) is not _FILE:
            reason = reason.replace(value.strip(), "...")
    return _QUOTED.sub("another value", reason)


_QUOTED = re.compile(r"(?<=invalid type: )[a-z ]+ [\"`].*[\"`]")
"""What obstore shows of a file of secrets that it cannot parse."""


_TEXT = re.compile(r"[^\x00-\x1f\x7f]*"), "one line of text"
_FILE = re.compile(r"(?!\{)[^\x00-\x1f\x7f]*"), "a path of a file"
_FLAG = re.compile(r"(?i:1|true|on|yes|y|0|false|off|no|n)"), "true or false"
_PORT = r"(?!0+(?!\d))0*(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
_NO_URL = r"\s\"<>\\^`{|}\x00-\x1f\x7f-\U0010ffff"
_URL = (
    re.compile(
        rf"https?://([^/?#@{_NO_URL}]*@)?([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:({_PORT})?)?(?=[/?#]|$)[^{_NO_URL}]*"
    ),
    "a URL that begins with http:// or https://",
)
_WORD = re.compile(r"[!-~]*"), "ASCII without spaces"

_KINDS = {
    "service_account_key": (re.compile(r"\{.*\}", re.DOTALL), "a JSON object"),
    "service_account(_path)?|application_credentials": _FILE,
    "(allow|disable|skip|unsigned|virtual|(storage_)?use)_.*|s3_express|request_payer|.*_(fallback|enabled)": _FLAG,
    ".*endpoint(_url)?(_s3)?|base_url|.*authority_host": _URL,
    ".*region|.*account_name|.*(tenant|authority)_id": (
        re.compile(r"[A-Za-z0-9._-]+"),
        "letters, digits, '.', '_', '-'",
    ),
    ".*account_key|storage_(access|master)_key": (re.compile(r"[A-Za-z0-9+/_-]+={0,2}"), "base64"),
    "access_key_id|(session_|storage_|bearer_)?token": _WORD,
}
"""What a value may be, and its description for errors, by a pattern of the setting's name without prefix; the first one
decides, and all others are text."""


def _kind_of(name: str) -> tuple[re.Pattern[str], str]:
    return next((kind for pattern, kind in _KINDS.items() if re.fullmatch(pattern, name)), _TEXT)


_OF_THE_URL = ("bucket", "bucket_name", "container_name")

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
    found = _in_environment(scheme)
    for name, (origin, raw) in found.items():
        kind = _kind_of(name)
        if {name, _SAME.get(name, name)} & (names | {_SAME.get(one, one) for one in names}):
            continue  # the value that was given goes before it
        if name == "default_region" and "region" in found:
            continue
        value = raw.strip()
        if not value and kind is _FLAG:
            value = "false"
        elif not value and name in ("region", "default_region"):
            value = variable("AWS_DEFAULT_REGION") or "us-east-1"
        elif not raw and kind is not _URL:
            continue  # obstore reads it as it reads one that is not set, or says what is missing
        if name.endswith("authority_host") and "://" not in value:
            value = f"https://{value}"  # the tools of Azure take it so
        if (value and value == raw and kind[0].fullmatch(value)) or not _has_setting(scheme, origin):
            continue
        # obstore prefers a region of the environment to a default that it is given here.
        setting = "aws_region" if name == "default_region" else origin.lower()
        settings[setting] = value and usable(name, origin, value, path)
    return settings


def _in_environment(scheme: str) -> dict[str, tuple[str, str]]:
    """Return the variables that obstore may read, by their names without prefix, and their values."""
    more = {"gs": ("SERVICE_ACCOUNT",), "az": ("IDENTITY_ENDPOINT",)}.get(scheme, ())
    names = [*set_variables(scheme), *(name for name in more if name in os.environ)]
    return {bare(name): (name, os.environ[name]) for name in names if bare(name) not in _OF_THE_URL}


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
    text, (allowed, expected) = value.strip(), _kind_of(name)
    if not allowed.fullmatch(text):
        raise StorageError(
            f"{origin} cannot be used; correct it, or unset it",
            path=path,
            errno=errno.EINVAL,
            expected=expected,
            found="another value, which is not shown",
        )
    return text


def _origin(scheme: str, name: object, value: object) -> str:
    """Return from where a setting is."""
    for one in set_variables(scheme):
        if os.environ[one] == value or (one.endswith("CONNECTION_STRING") and value and str(value) in os.environ[one]):
            return one
    return f"the setting {printable(str(name))!r}"


def added_authorities(scheme: str) -> dict[str, Any]:
    """Return the authorities that the environment adds, under the names that curl, requests and the AWS tools use.

    Raises:
        StorageError: Their file cannot be read.
    """
    names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    for name in ("AWS_CA_BUNDLE", *names) if scheme == "s3" else names:
        path = variable(name)
        if not path or os.path.isdir(path):  # a directory of many: those of the system are used
            continue
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:
            what = OSError(errno.EINVAL, "no path") if isinstance(error, ValueError) else error
            raise refused(f"reading the certificates of {name}", path, what) from error
        if b"-----BEGIN CERTIFICATE-----" not in data:
            raise StorageError(
                f"the file of {name} has no certificate; correct it, or unset it",
                path=path,
                errno=errno.EINVAL,
                expected="-----BEGIN CERTIFICATE-----",
            )
        return {"root_certificate": data}
    return {}


def maker_of(scheme: str) -> Any:
    """Return what makes a store of obstore, of a URL of http, or of the name of a bucket or container."""
    stores: Any = import_module("obstore.store")
    kinds = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
    return kinds.get(scheme, stores.HTTPStore.from_url)


def _has_setting(scheme: str, name: str) -> bool:
    """Return whether obstore has a setting. It has no list of them, but takes one after the other until it rejects one.

    Args:
        scheme: Scheme of the store.
        name: Name of the setting, or of its variable.
    """
    try:
        # The second name is rejected at the latest: nothing is read from the environment, and no store is made.
        maker_of(scheme)("http://host", config={name: "", "no such setting": ""})
    except Exception as error:  # "Configuration key: 'regoin' is not valid for store 'S3'."
        return re.search(rf"key: '?{re.escape(name)}(?![\w-])", str(error), re.IGNORECASE) is None
    return True
