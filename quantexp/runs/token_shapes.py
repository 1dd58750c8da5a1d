"""Texts that are secrets by their shape or by the name before them, whatever variable they come from.

Providers give their tokens a prefix so that programs such as this one recognise them. A pattern here matches what no
folder, scheme or number of an experiment looks like: a prefix, and then at least 16 characters without a separator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

#: Names of variables and keys that hold secrets: `HF_TOKEN`, `GITHUBTOKEN`, `clientSecret`, `DB_PWD`.
_SECRET_NAME = re.compile(
    r"(^|[_.-])("
    r"[^\W_]*TOKEN|[^\W_]*SECRET|[^\W_]*PASSWORD|[^\W_]*PASSWD|[^\W_]*PASSPHRASE|(?!COMPASS|BYPASS)[A-Z]*PASS|[^\W_]*PWD"
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


class Shape(NamedTuple):
    """A pattern, and the words for what it matches."""

    words: str
    pattern: re.Pattern[str]


def _shape(words: str, pattern: str, flags: int = 0) -> Shape:
    return Shape(words, re.compile(pattern, flags))


_START = r"(?<![A-Za-z0-9])"
SHAPES = (
    _shape(
        "private key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
        re.DOTALL,
    ),
    _shape("JSON web token", r"(?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"),
    _shape("Hugging Face token", _START + r"(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    _shape("GitHub token", _START + r"(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})"),
    _shape("GitLab token", _START + r"gl(?:pat|rt|dt|cbt|ptt|soat)-[\w-]{20,}"),
    _shape("API key", _START + r"sk-(?:[A-Za-z0-9]+-){0,3}\w{20,}[\w-]*"),
    _shape("Slack token", _START + r"(?:xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,})"),
    _shape("AWS key", _START + r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _shape("Google key", _START + r"(?:AIza[\w-]{35}|ya29\.[\w-]{20,})"),
    _shape("package registry token", _START + r"(?:npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,})"),
    _shape(
        "webhook",
        r"https://(?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks)/[\w/-]+",
    ),
)
#: NAME=value, NAME: value, "NAME": "value", and `Authorization: Bearer value`.
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?P<name>[A-Za-z_][\w.-]{1,100})[\"']?[ \t]{0,20}[=:][ \t]{0,20}(?:(?:Bearer|Basic|Token) )?"
    r"(?P<quote>[\"']?)(?P<value>[^\s\"'$<>(){}\[\],;]{8,})"
)
_RANDOM = re.compile(
    r"(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9/+_=~-]{16,}|[0-9a-fA-F]{32,}|[0-9A-Z]{32,}"
)
_ENVIRONMENT_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name holds a secret, not only its location."""
    if name in _NO_SECRETS or not _SECRET_NAME.search(name):
        return False
    return not _LOCATION.search(name) or _HOOK.search(name) is not None


def secrets_by_shape(text: str) -> Iterator[tuple[str, str]]:
    """Each secret in a text that its shape or the name before it shows, with the words for it.

    After an upper-case name, as of a variable, any quoted value or one with a digit is a secret; after another name, as
    in source code, only a value that looks random.
    """
    for words, pattern in SHAPES:
        for match in pattern.finditer(text):
            yield words, match.group()
    for match in _ASSIGNED.finditer(text):
        name, value = match["name"].rpartition(".")[2], match["value"]
        if is_secret_name(name) and _is_value(name, value, bool(match["quote"])):
            yield f"value of {name}", value


def _is_value(name: str, value: str, quoted: bool) -> bool:
    if _RANDOM.fullmatch(value):
        return True
    if value.startswith(("/", "~", ".")) or not _ENVIRONMENT_NAME.fullmatch(name):
        return False
    return quoted or any(character.isdigit() for character in value)
