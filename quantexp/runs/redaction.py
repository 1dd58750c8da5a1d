"""Keeps secrets of the environment out of files and messages.

API keys, tokens and passwords reach a run only through environment variables, recognised by their names. A text that
contains the value of such a variable contains a secret, wherever the text comes from (a command line, a diff, an error
message of a library). A configuration with a secret is refused; elsewhere the variable's name replaces the value. A
secret that no variable of this process holds cannot be recognised, except a password in an address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from quantexp.errors import ConfigError

#: Names of variables that hold secrets.
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|\w*PASSWORD|PASSWD|PASSPHRASE|PASS|CREDENTIALS?|\w*KEY|PAT|JWT)(_|$)", re.I
)
#: Names of variables that hold only the location or type of a secret.
_LOCATION = re.compile(r"_(FILE|FILES|PATH|DIR|SOCK|URL|NAME|TYPE|TTL)$", re.I)
#: Shorter values (on, true, none) are common words, not secrets.
SHORTEST = 8
#: scheme://user:password@host
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)[^/?#@\s]+@")


def secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variable -> value, for variables whose names mark them as secrets; longest values first."""
    values = {
        name: value.strip()
        for name, value in environment.items()
        if _SECRET.search(name) and not _LOCATION.search(name)
    }
    long = {name: value for name, value in values.items() if len(value) >= SHORTEST}
    return dict(sorted(long.items(), key=lambda pair: len(pair[1]), reverse=True))


def secret_in(text: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The variable whose secret a text contains; None if it contains none."""
    return next((name for name, value in secrets(environment).items() if value in text), None)


def redacted(content: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """JSON content with `<VARIABLE>` in place of each secret, and addresses without user and password."""
    return _replaced(content, secrets(environment))


def refuse_secrets(
    content: Any, environment: Mapping[str, str] = os.environ, key: str = ""
) -> None:
    """Refuse a configuration, given as nested dicts and lists, that contains a secret.

    Raises:
        ConfigError: names the key and the variable whose value it holds.
    """
    if isinstance(content, dict):
        for name, value in content.items():
            refuse_secrets(value, environment, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            refuse_secrets(value, environment, f"{key}[{index}]")
    elif isinstance(content, str) and (variable := secret_in(content, environment)):
        raise ConfigError(
            f"{key} must hold no secret, got the value of the environment variable {variable}; the configuration is "
            "written to the run folder, and programs read secrets from the environment themselves"
        )


def without_userinfo(text: str) -> str:
    """A text whose addresses have no user and password."""
    return _USERINFO.sub(r"\g<scheme>", text)


def _replaced(content: Any, values: dict[str, str]) -> Any:
    if isinstance(content, str):
        for name, value in values.items():
            content = content.replace(value, f"<{name}>")
        return without_userinfo(content)
    if isinstance(content, dict):
        return {_replaced(key, values): _replaced(value, values) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replaced(value, values) for value in content]
    return content
