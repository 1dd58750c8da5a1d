"""What the command line knows of a verb. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """The content of a verb's help."""

    #: One line in the list of verbs.
    about: str
    #: What follows the verb.
    usage: str
    #: What follows `quantexp`, each.
    examples: tuple[str, ...]
    #: More about it, in lines of at most 78 characters.
    more: str = ""
    #: Its module in this package, where it has not the verb's name.
    module: str | None = None
