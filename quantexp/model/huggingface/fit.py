"""Checks that published weights belong to a model: tensors, shapes and published configuration."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

from quantexp.errors import DataError
from quantexp.folders import user_path
from quantexp.model.huggingface.configuration import numbers, read_config
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.huggingface.weights import DTYPES, Weights, open_weights
from quantexp.schema import ModelConfig

#: Names per kind in a message.
_NAMED = 5
#: Suffix of tensors that follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"
#: Numbers that may differ in the weights' own configuration, as they do not change the meaning of the weights.
_FREE = (
    *("max_sequence_length", "sliding_window", "init_std"),
    *("aux_loss", "aux_loss_coefficient"),
)


def fitting_weights(
    model: ModelConfig, path: Path | None = None, origin: str | None = None
) -> Weights:
    """The weights at a path, which must have every tensor of the model and no other.

    Args:
        model: the model that they must fit.
        path: a folder or file; None means `model.init_from`.
        origin: the key and value that named the path, for messages.

    Raises:
        DataError: they cannot be read, or belong to another model.
        ConfigError: their config.json describes no supported model.
    """
    weights = open_weights(path or user_path(str(model.init_from)))
    problems = [*_other_numbers(model, weights.config), *_other_tensors(model, weights)]
    _refuse(model, problems, origin or f"model.init_from={model.init_from}")
    return weights


def require_same_numbers(model: ModelConfig, config: Path, origin: str) -> None:
    """Refuse a config.json that describes another model; one that is missing describes any.

    The errors are those of `fitting_weights`.
    """
    _refuse(model, _other_numbers(model, config), origin)


def _refuse(model: ModelConfig, problems: list[str], origin: str) -> None:
    if problems:
        raise DataError(
            f"{origin} does not hold the weights of this {model.name}: {'; '.join(problems)}"
        )


def _other_numbers(model: ModelConfig, config: Path) -> list[str]:
    """Numbers that differ in the config.json beside the weights; shapes do not reveal all of them."""
    if not config.is_file():
        return []
    theirs = _flat(numbers(read_config(config), config))
    ours = _flat(dataclasses.asdict(model))
    parts = [key for key in ours if "." in key]
    different = [
        f"model.{key} is {ours.get(key)} and its config.json says {theirs.get(key)}"
        for key in dict.fromkeys([*theirs, *parts])
        if key.split(".")[-1] not in _FREE and ours.get(key) != theirs.get(key)
    ]
    remedy = f" (model.from_hf={config} takes all of its numbers)"
    return [_first(different) + remedy] if different else []


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value.name if isinstance(value, Enum) else value
    return flat


def _other_tensors(model: ModelConfig, weights: Weights) -> list[str]:
    expected, stored = published(mapping(model)), weights.tensors
    allowed = {*expected, "lm_head.weight"} if model.tie_embeddings else set(expected)
    both = [name for name in expected if name in stored]
    kinds = {
        "missing": [name for name in expected if name not in stored],
        "not of this model": [
            name for name in stored if name not in allowed and not name.endswith(_DERIVED)
        ],
        "of another shape": [
            f"{name} {list(stored[name].shape)} instead of {list(expected[name])}"
            for name in both
            if stored[name].shape != expected[name]
        ],
        f"neither {', '.join(DTYPES)}": [
            f"{name} {stored[name].dtype}" for name in both if stored[name].dtype not in DTYPES
        ],
    }
    return [
        f"{len(names)} tensors {what}: {_first(names)}" for what, names in kinds.items() if names
    ]


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
