"""Keeps secrets out of files and messages.

API keys, tokens and passwords reach a run only through environment variables, recognised by their names. A text that
contains the value of such a variable contains a secret, wherever the text comes from (a command line, a diff, an error
message of a library). So does a text with `NAME=value` of such a name, or an address with a password. A configuration
with a secret is refused; elsewhere the name replaces the value.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from quantexp.errors import ConfigError

#: Shorter values (on, true, none) are common words, not secrets.
SHORTEST = 8
#: scheme://user:password@host
_USERINFO = re.compile(r"(?P<scheme>(?<![\w+.-])[A-Za-z][\w+.-]{0,40}://)[^/?#@\s]+@")
_PASSWORD = re.compile(r"(?<![\w+.-])[A-Za-z][\w+.-]{0,40}://[^/?#@\s:]*:[^/?#@\s]+@")
#: Values of a key named like a secret that are none.
_SWITCHES = re.compile(r"|true|false|yes|no|on|off|none|null|auto|-?[\d.]{1,6}|[\$<].*", re.I)
#: Names of variables and keys that hold secrets: `HF_TOKEN`, `GITHUBTOKEN`, `clientSecret`, `DB_PWD`.
_SECRET_NAME = re.compile(
    r"(^|[_.-])("
    r"[^\W_]*TOKEN|[^\W_]*SECRETS?|[^\W_]*PASSWORD|[^\W_]*PASSWD|[^\W_]*PASSPHRASE|(?!COMPASS|BYPASS)[A-Z]*PASS|[^\W_]*PWD"
    r"|[^\W_]*CREDENTIALS?|PAT|JWT|[^\W_]*BEARER|[^\W_]*COOKIES?|AUTHORIZATION|DSN|[^\W_]*WEBHOOK"
    r")\d*($|[_.-])"
    # Further words may follow: NCCL_IB_PKEY_INDEX, key_value, AUTH_METHOD.
    r"|(?<!MON)KEYS?\d*(_ID|_BASE64|_B64|_PEM|_JSON|_\d+)?$|AUTH$",
    re.I,
)
#: Names that hold only the location or type of a secret, or the working directory.
_LOCATION = re.compile(r"[_.-](FILE|FILES|PATH|DIR|SOCK|URL|URI|NAME|TYPE|TTL|ENDPOINT)$", re.I)
_HOOK = re.compile(r"WEBHOOK|DSN", re.I)
_NO_SECRETS = frozenset({"PWD", "OLDPWD"})
#: NAME=value, NAME: value and "NAME": "value" of a variable, and `Authorization: Bearer value`.
_ASSIGNED = re.compile(
    r"(?<![\w-])(?P<name>[A-Z][A-Z0-9_]{1,100}|[Aa]uthorization)[\"']?[ \t]{0,20}[=:][ \t]{0,20}"
    r"(?:(?:Bearer|Basic|Token) )?[\"']?(?P<value>[^\s\"'$<>(){}\[\],;/~.][^\s\"'$<>(){}\[\],;]{7,})"
)
_REMEDY = (
    "the configuration is written to the run folder and to the job's script. Export the variable in the shell that "
    "submits: a local run and sbatch pass it to the job, and programs read it there"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name holds a secret, not only its location."""
    if name in _NO_SECRETS or not _SECRET_NAME.search(name):
        return False
    return not _LOCATION.search(name) or _HOOK.search(name) is not None


def secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variable -> value, for variables whose names mark them as secrets; longest values first."""
    values = {name: value.strip() for name, value in environment.items() if is_secret_name(name)}
    long = {name: value for name, value in values.items() if len(value) >= SHORTEST}
    return dict(sorted(long.items(), key=lambda pair: len(pair[1]), reverse=True))


def secret_in(text: str, values: Mapping[str, str]) -> str | None:
    """The variable of those that `secrets` returned whose value a text contains; None if it contains none."""
    return next((name for name, value in values.items() if value in text), None)


def redacted(content: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """JSON content with a name in angle brackets in place of each secret, and addresses without user and password."""
    return _replaced(content, secrets(environment))


def redacted_text(text: str) -> str:
    """A text as `redacted` returns it."""
    return str(redacted(text))


def refuse_secrets(content: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a configuration, given as nested dicts and lists, that contains a secret.

    Raises:
        ConfigError: names the key and what its value looks like, never the value.
    """
    _refuse(content, secrets(environment), "")


def _refuse(content: Any, values: Mapping[str, str], key: str) -> None:
    """Refuse content with one of these values of variables, or with a value after the name of a secret."""
    if isinstance(content, dict):
        for name, value in content.items():
            below = f"{key}.{name}" if key else str(name)
            _refuse_name(str(name), value, below)
            _refuse(str(name), values, f"a key of {key or 'the configuration'}")
            _refuse(value, values, below)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            _refuse(value, values, f"{key}[{index}]")
    elif isinstance(content, str):
        if variable := secret_in(content, values):
            raise _refusal(key, f"the value of the environment variable {variable}")
        if _PASSWORD.search(content):
            raise _refusal(key, "an address with a password")
        for name, _ in _assigned(content):
            raise _refusal(key, f"a value under the name {name}")


def _assigned(text: str) -> Iterator[tuple[str, str]]:
    """Each name of a secret that is followed by a value in a text, with the value; a path is none."""
    for match in _ASSIGNED.finditer(text):
        if is_secret_name(match["name"]):
            yield match["name"], match["value"]


def _refuse_name(name: str, value: Any, key: str) -> None:
    if isinstance(value, str) and is_secret_name(name) and not _SWITCHES.fullmatch(value):
        raise _refusal(key, f"a value under the name {name}")


def _refusal(key: str, content: str) -> ConfigError:
    return ConfigError(f"{key} must hold no secret, got {content}; {_REMEDY}")


def without_userinfo(text: str) -> str:
    """A text whose addresses have no user and password."""
    return _USERINFO.sub(r"\g<scheme>", text)


def _replaced(content: Any, values: dict[str, str]) -> Any:
    if isinstance(content, str):
        for name, value in values.items():
            for form in (value, quote(value, safe="")):
                content = content.replace(form, f"<{name}>")
        for name, value in list(_assigned(content)):
            content = content.replace(value, f"<{name}>")
        return without_userinfo(content)
    if isinstance(content, dict):
        return {_replaced(key, values): _replaced(value, values) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replaced(value, values) for value in content]
    return content


class RedactingFormatter(logging.Formatter):
    """Formats log records, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record, with its traceback."""
        return redacted_text(super().format(record))
