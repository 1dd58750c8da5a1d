"""The words of `quantexp branch` and `quantexp gradient`, checked as far as no run is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantexp.analysis.compare.arguments import out_and_rest
from quantexp.cli.arguments import parser_of, root_and_rest
from quantexp.cli.output import require_folder
from quantexp.errors import ConfigError
from quantexp.extras.resolve.arms import BASELINE

#: What may be changed of how processes run: how these words begin.
_CHANGEABLE = ("launcher.", "memory=")
#: What composes schemes: how these words begin.
_SCHEMES = ("quant=", "quant.", "quant/")


@dataclass(frozen=True)
class Request:
    """What the words ask for."""

    runs: tuple[str, ...]
    root: Path
    #: What composes schemes, and what changes how processes run.
    schemes: tuple[str, ...]
    overrides: tuple[str, ...]
    against: str
    folder: Path
    is_dry: bool


def request_of(verb: str, words: Sequence[str]) -> Request:
    """The request of a verb's words; its results are in a folder with the verb's name unless `out=` says otherwise.

    Raises:
        ConfigError: a word that no design can have.
    """
    out, rest = out_and_rest(words)
    folder = out or Path(verb)
    require_folder(folder)
    given = dict(word.split("=", 1) for word in rest if word.startswith(("dry_run=", "against=")))
    is_dry = given.get("dry_run", "false").lower()
    if is_dry not in ("true", "false"):
        raise ConfigError(f"dry_run must be true or false, got {is_dry}")
    rest = [word for word in rest if not word.startswith(("dry_run=", "against="))]
    root, rest = root_and_rest(rest)
    names = tuple(word for word in rest if "=" not in word)
    overrides = tuple(word for word in rest if word.startswith(_CHANGEABLE))
    schemes = tuple(word for word in rest if word.lstrip("+~").startswith(_SCHEMES))
    for word in rest:
        if word not in (*names, *overrides, *schemes):
            raise ConfigError(
                f"{word} has no effect on quantexp {verb}, in which all but quant is as in the runs: drop it"
            )
    if not names:
        parser_of(verb).error(f"{verb} needs RUN: a run, a part of its name, or their folder")
    against = given.get("against") or BASELINE
    return Request(names, root, schemes, overrides, against, folder, is_dry == "true")


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """The whole numbers of a flag's `A,B`.

    Raises:
        ConfigError: one is none, or below 1.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--{flag} must be whole numbers of at least 1, as 10,50, got {text}")
    return tuple(sorted({int(part) for part in parts}))


def require_margin(margin: float) -> None:
    """Refuse a margin of equivalence that is none.

    Raises:
        ConfigError: it is not positive and finite.
    """
    if not 0 < margin < math.inf:
        raise ConfigError(f"--margin must be greater than 0, got {margin}")
