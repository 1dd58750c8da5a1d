"""Whether an experiment holds what the user wrote: an oracle that reads the typed words without Hydra."""

from __future__ import annotations

import re
from decimal import Decimal
from enum import Enum
from typing import Any, get_args

from quantexp.config.choices import groups
from quantexp.schema import Experiment
from tests.hostile.overrides import KEYS, hint_of

_TRUE, _FALSE = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
_PLAIN = re.compile(r"[\w.+/-]+", re.ASCII)
#: Filled in by rules that docs/commands.md and docs/data.md describe, whatever is written.
_COMPLETED = {
    "capture.first_iteration",  # at least the iteration after start_from
    "dataset.sample",  # false with a path
    "dataset.tokenizer",  # byte for the sample
    "model.vocab_size",  # 257 for the sample
    "quant.name",  # derived
    "analysis.auto",  # in small letters
}

#: null leaves them to the data: the card's split, or the name of the dataset and its sample.
_OF_DATA = {"dataset.label", "dataset.split"}


def lost(experiment: Experiment, words: list[str]) -> list[str]:
    """The words whose typed value the experiment does not hold; the last word of a key counts."""
    typed: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if equals and not key.startswith("~"):
            typed[key.strip().lstrip("+")] = value.strip()
    return [
        f"{key}={value} is {_value(experiment, key)!r}"
        for key, value in typed.items()
        if key in KEYS and key not in _COMPLETED and not _holds(experiment, key, value)
    ]


def unaffected(experiment: Experiment, plain: Experiment, words: list[str]) -> list[str]:
    """The words that were accepted and neither name a value the experiment has anyway nor change it."""
    if experiment != plain:
        return []
    return [word for word in words if not _is_allowed(word)]


def _is_allowed(word: str) -> bool:
    key = word.partition("=")[0].strip().lstrip("+~")
    section = key in ("sweep", "model.mla", "model.mla.yarn", "model.moe") or key in _sections()
    of_hydra = key in ("hydra.searchpath", "hydra.sweeper.params")  # null drops those of a file
    return key in KEYS or key in groups() or section or of_hydra


def _sections() -> set[str]:
    """Sections of the schema: a mapping may repeat their values."""
    parts = (key.split(".") for key in KEYS)
    return {".".join(names[:n]) for names in parts for n in range(1, len(names))}


def _value(experiment: Experiment, key: str) -> Any:
    value: Any = experiment
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _holds(experiment: Experiment, key: str, typed: str) -> bool:
    """Whether the value is what the typed word says; words that are no plain number or text are not judged."""
    value = _value(experiment, key)
    if not _PLAIN.fullmatch(typed) and not re.fullmatch(r"'[^'\\]*'", typed):
        return True
    hint = hint_of(key)
    kinds = get_args(hint) or (hint,)
    text = typed[1:-1] if typed.startswith("'") else typed
    if typed.lower() == "null" and type(None) in kinds:
        return value is None or key in _OF_DATA
    if isinstance(value, Enum):
        return value.name == text
    if bool in kinds:
        return text.lower() in (_TRUE if value else _FALSE)
    if int in kinds or float in kinds:
        return float(text) == value if isinstance(value, float) else Decimal(text) == value
    return str not in kinds or value == text
