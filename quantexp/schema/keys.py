"""The full keys of the configuration, as a person types them: `training.lr`."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from quantexp.schema.experiment import Composition

#: Options of the old scripts, with `_` for `-` -> our keys.
OLD_KEYS = {
    **dict.fromkeys(("quantization", "quantisation", "scheme"), "quant"),
    **dict.fromkeys(("quant_type", "custom_quant_type", "quant_scheme"), "quant"),
    **dict.fromkeys(("fa_quantization", "fa_quant", "qk_quant", "qk_quantization"), "quant/qk"),
    **dict.fromkeys(("pv_quant", "pv_quantization"), "quant/pv"),
    **dict.fromkeys(("linear_quant", "linear_quantization"), "quant/linear"),
    **dict.fromkeys(("training_config", "train_config", "training_preset", "preset"), "training"),
    **dict.fromkeys(("model_name", "model_type"), "model"),
    "dataset_name": "dataset",
    "control_iter": "capture.control_iter",
    "collect_micro_batches": "capture.collect_micro_batches",
    **dict.fromkeys(("tensor_dir", "tensor_save_dir"), "capture.dir"),
    "tensor_save_enabled": "capture",
    "output_dir": "paths.root",
    "train_iters": "training.iterations",
}
#: The place of an element in a list.
_INDEX = re.compile(r"\[\d+\]")


def section_of(owner: Any, name: str) -> Any:
    """The dataclass type of a field of a dataclass; None if the field is not a section."""
    hint = _hint(owner, name)
    kinds = [kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)]
    return kinds[0] if kinds and get_origin(hint) is not list else None


def is_mapping(owner: Any, name: str) -> bool:
    """Whether a field of a dataclass is a mapping whose keys the user chooses."""
    return get_origin(_hint(owner, name)) is dict


def keys(owner: Any = Composition, parent: str = "") -> list[str]:
    """The full keys of a section and its subsections; keys within lists are not included."""
    result = []
    for field in dataclasses.fields(owner):
        section = section_of(owner, field.name)
        key = f"{parent}{field.name}"
        result += keys(section, f"{key}.") if section else [key]
    return result


@cache
def kind_of(key: str) -> Any:
    """The type of a full key's value, null aside; str below a mapping of texts (`launcher.environment.NAME`).

    A number in brackets takes an element of a list of sections: `quant.rules[0].layers`.
    """
    owner: Any = Composition
    *parents, name = _INDEX.sub("", key).split(".")
    for parent in parents:
        section = section_of(owner, parent) or _element(_hint(owner, parent))
        if section is None:
            return str if _hint(owner, parent) == dict[str, str] else None
        owner = section
    hint = _hint(owner, name)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 and get_origin(hint) is UnionType else hint


def element_of(key: str) -> Any:
    """The dataclass of the elements of a list; None for another key, and for a list of values."""
    return _element(kind_of(key))


def _element(kind: Any) -> Any:
    lists = [each for each in (kind, *get_args(kind)) if get_origin(each) is list]
    elements = [element for each in lists for element in get_args(each)]
    return next(filter(dataclasses.is_dataclass, elements), None)


@cache
def _hint(owner: Any, name: str) -> Any:
    return get_type_hints(owner).get(name)
