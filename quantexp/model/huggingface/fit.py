"""Whether published weights are those of a model: their tensors, shapes and published configuration."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

from quantexp.errors import DataError
from quantexp.model.huggingface.configuration import numbers, read_config
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.huggingface.weights import DTYPES, Weights, open_weights
from quantexp.schema import ModelConfig

#: How many of each kind a message names.
_NAMED = 5
#: Tensors that follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"
#: What the weights' own configuration may say otherwise: nothing of it changes what the weights mean.
_FREE = ("max_sequence_length", "init_std", "aux_loss", "aux_loss_coefficient")


def fitting_weights(
    model: ModelConfig, path: Path | None = None, given: str | None = None
) -> Weights:
    """The weights at a path, which have every tensor of the model and no other.

    Args:
        model: what they are to be of.
        path: a folder or file; None is `model.init_from`.
        given: the key and value that named it, for messages.

    Raises:
        DataError: they cannot be read, or are another model's.
        ConfigError: their config.json is none of a model that is built here.
    """
    weights = open_weights(path or Path(str(model.init_from)).expanduser())
    if problems := [*_other_numbers(model, weights), *_other_tensors(model, weights)]:
        raise DataError(
            f"{given or f'model.init_from={model.init_from}'} does not hold the weights of this {model.name}: "
            f"{'; '.join(problems)}"
        )
    return weights


def _other_numbers(model: ModelConfig, weights: Weights) -> list[str]:
    """What the config.json beside the weights says otherwise; shapes do not show all of it."""
    if not weights.config.is_file():
        return []
    theirs = _flat(numbers(read_config(weights.config), weights.config))
    ours = _flat(dataclasses.asdict(model))
    parts = [key for key in ours if "." in key]
    different = [
        f"model.{key} is {ours.get(key)} and its config.json says {theirs.get(key)}"
        for key in dict.fromkeys([*theirs, *parts])
        if key.split(".")[-1] not in _FREE and ours.get(key) != theirs.get(key)
    ]
    remedy = f" (model.from_hf={weights.config} takes all of its numbers)"
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
    wanted, found = published(mapping(model)), weights.tensors
    of_the_model = {*wanted, "lm_head.weight"} if model.tie_embeddings else set(wanted)
    both = [name for name in wanted if name in found]
    kinds = {
        "missing": [name for name in wanted if name not in found],
        "not of this model": [
            name for name in found if name not in of_the_model and not name.endswith(_DERIVED)
        ],
        "of another shape": [
            f"{name} {list(found[name].shape)} instead of {list(wanted[name])}"
            for name in both
            if found[name].shape != wanted[name]
        ],
        f"neither {', '.join(DTYPES)}": [
            f"{name} {found[name].dtype}" for name in both if found[name].dtype not in DTYPES
        ],
    }
    return [
        f"{len(names)} tensors {what}: {_first(names)}" for what, names in kinds.items() if names
    ]


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
