"""Secrets of the environment: told by their variables' names, kept out of what is written or sent.

API keys, tokens and passwords reach a run through environment variables alone. They are not looked for by their form
but by their values: a text that holds the value of such a variable holds a secret, wherever it came from (a command
line, a diff, an error message of a library). A configuration with one in it is refused; elsewhere the variable's name
is put in its place. A secret that is in no variable of this process cannot be known, but for a password in an address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from quantexp.errors import ConfigError

#: Variables that hold secrets; those that only say where one is kept do not.
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|\w*PASSWORD|PASSWD|PASSPHRASE|PASS|CREDENTIALS?|\w*KEY|PAT|JWT)(_|$)", re.I
)
_WHEREABOUTS = re.compile(r"_(FILE|FILES|PATH|DIR|SOCK|URL|NAME|TYPE|TTL)$", re.I)
#: Shorter values (on, true, none) are words that may stand anywhere.
SHORTEST = 8
#: scheme://user:password@host
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)[^/?#@\s]+@")


def secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variable -> value, for variables that hold secrets by their names; longest values first."""
    found = {
        name: value.strip()
        for name, value in environment.items()
        if _SECRET.search(name) and not _WHEREABOUTS.search(name)
    }
    long = {name: value for name, value in found.items() if len(value) >= SHORTEST}
    return dict(sorted(long.items(), key=lambda pair: len(pair[1]), reverse=True))


def secret_in(text: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The variable whose secret stands in a text, if any does."""
    return next((name for name, value in secrets(environment).items() if value in text), None)


def redacted(content: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """JSON content with `<VARIABLE>` where a secret stood, and no user or password in addresses."""
    return _replaced(content, secrets(environment))


def refuse_secrets(
    content: Any, environment: Mapping[str, str] = os.environ, key: str = ""
) -> None:
    """Refuse a configuration, as nested dicts and lists, with a secret in it.

    Raises:
        ConfigError: the key that holds it, and the variable whose value it is.
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
    """A text without user and password in its addresses."""
    return _USERINFO.sub(r"\g<scheme>", text)


def _replaced(content: Any, found: dict[str, str]) -> Any:
    if isinstance(content, str):
        for name, value in found.items():
            content = content.replace(value, f"<{name}>")
        return without_userinfo(content)
    if isinstance(content, dict):
        return {_replaced(key, found): _replaced(value, found) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replaced(value, found) for value in content]
    return content
