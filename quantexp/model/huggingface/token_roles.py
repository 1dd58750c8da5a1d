"""Which tokens begin, end and pad a text, in a published configuration, and how answers are generated.

They change no number of training, so a model does not have them; checkpoints and exports keep those of the
configuration that their run started from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantexp.model.huggingface import CONFIG, GENERATION
from quantexp.model.huggingface.configuration import read_config

_SUFFIX = "_token_id"


@dataclass(frozen=True)
class TokenRoles:
    """What is kept of a configuration."""

    #: Entries of config.json: `bos_token_id` and so on; null where there is none, or transformers fills in its own.
    entries: dict[str, Any] = field(
        default_factory=lambda: dict.fromkeys(("bos_token_id", "eos_token_id"))
    )
    #: The content of generation_config.json; None without one.
    generation: bytes | None = None


def token_roles(*sources: Path | None) -> TokenRoles:
    """The roles of the first source that has any.

    Args:
        sources: folders with a config.json, or files in them; None and those without one have no roles.

    Raises:
        ConfigError: a config.json is no JSON object.
        OSError: a generation_config.json cannot be read.
    """
    for folder in _folders(sources):
        content = read_config(folder)
        entries = {key: value for key, value in content.items() if key.endswith(_SUFFIX)}
        file = folder / GENERATION
        if entries or file.is_file():
            generation = file.read_bytes() if file.is_file() else None
            return TokenRoles(TokenRoles().entries | entries, generation)
    return TokenRoles()


def _folders(sources: Iterable[Path | None]) -> Iterable[Path]:
    given = (each if each.is_dir() else each.parent for each in sources if each is not None)
    return (folder for folder in given if (folder / CONFIG).is_file())
