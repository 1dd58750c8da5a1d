"""The displayed name of a model: its name, its differences from the published one, and its size.

A run may keep the name of a published model and change its numbers. The label compares the run's numbers with the
shipped `conf/model/NAME.yaml`:

    llama32-1b, 1.24B parameters
    llama32-1b cut to 2 of 16 layers, vocabulary 257 of 128,256: 122M parameters
    llama32-1b changed to 20 layers (published 16): 1.48B parameters
    mine, 2 layers of width 64: 115k parameters           a model that is not shipped

It needs no torch and never fails: for an incomplete configuration it describes what is present.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import yaml

from quantexp.folders import conf_dir
from quantexp.model.sizes import num_parameters
from quantexp.schema import MlaConfig, ModelConfig, MoeConfig, YarnConfig

#: Number with a size -> its words, for cut and for changed models.
_SIZES = {
    "num_layers": "{} layers",
    "hidden_size": "width {}",
    "ffn_hidden_size": "feed-forward {}",
    "num_attention_heads": "{} heads",
    "num_query_groups": "{} key-value heads",
    "head_dim": "head width {}",
    "vocab_size": "vocabulary {}",
    "moe.num_experts": "{} experts",
    "moe.top_k": "{} experts a token",
    "moe.expert_ffn_hidden_size": "expert width {}",
    "moe.num_shared_experts": "{} shared experts",
    "moe.num_dense_layers": "{} dense layers",
    "mla.q_lora_rank": "query latent {}",
    "mla.kv_lora_rank": "key-value latent {}",
    "mla.qk_head_dim": "head width without position {}",
    "mla.qk_pos_emb_head_dim": "head width with position {}",
    "mla.v_head_dim": "value head width {}",
}
#: Keys that do not describe the model's shape, or repeat another number.
_SILENT = {"name", "from_hf", "init_from", "max_sequence_length", "init_std", "sliding_window"}
_SECTIONS = {"mla": MlaConfig, "moe": MoeConfig}


def describe_model(model: ModelConfig | Mapping[str, Any]) -> str:
    """Name, changes against the published model, and the number of parameters.

    A mapping is the `model` section of a config.yaml of any version of quantexp; empty for an empty one.
    """
    numbers = asdict(model) if isinstance(model, ModelConfig) else dict(model)
    words = _shape(numbers)
    size = parameters_words(model)
    return words if size is None else f"{words}{':' if ' ' in words else ','} {size} parameters"


def short_model_label(model: ModelConfig | Mapping[str, Any]) -> str:
    """Name and size for a column of a table: `llama32-1b cut to 122M of 1.24B parameters`.

    For a model that is not merely smaller: `llama32-1b changed, 1.48B parameters (published 1.24B)`.
    """
    numbers = asdict(model) if isinstance(model, ModelConfig) else dict(model)
    name, size = str(numbers.get("name") or ""), parameters_words(model)
    published = None if numbers.get("from_hf") else _published(name)
    changes = [] if published is None else list(_changes(numbers, published))
    if size is None or published is None or not changes:
        return name if size is None else f"{name}, {size} parameters"
    if _is_cut(changes):
        return f"{name} cut to {size} of {parameters_words(published)} parameters"
    return f"{name} changed, {size} parameters (published {parameters_words(published)})"


def parameters_words(model: ModelConfig | Mapping[str, Any]) -> str | None:
    """`1.24B`, `122M`, `115k`; None if the configuration is incomplete."""
    try:
        count = num_parameters(model if isinstance(model, ModelConfig) else _typed(model))
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    return count_words(count)


def count_words(count: float) -> str:
    """A count with three digits: `1.24B`, `122M`, `1.25M`, `115k`, `812`."""
    if count < 1000:
        return str(int(count))
    for unit in ("k", "M", "B"):
        count /= 1000
        if count < 999.5 or unit == "B":
            break
    decimals = 2 if count < 9.995 else 1 if count < 99.95 else 0
    digits = f"{count:.{decimals}f}"
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}{unit}"


def _shape(numbers: Mapping[str, Any]) -> str:
    name = str(numbers.get("name") or "")
    published = None if numbers.get("from_hf") else _published(name)
    if published is None:
        layers, width = numbers.get("num_layers"), numbers.get("hidden_size")
        of_width = f" of width {width:,}" if isinstance(width, int) else ""
        return name if layers is None else f"{name}, {layers} layers{of_width}"
    changes = list(_changes(numbers, published))
    if not changes:
        return name
    if _is_cut(changes):
        return f"{name} cut to {', '.join(_cut(*change) for change in changes)}"
    return f"{name} changed to {', '.join(_changed(*change) for change in changes)}"


def _changes(
    numbers: Mapping[str, Any], published: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Every number that differs, with both values; dependent numbers are omitted."""
    ours, theirs = _flat(numbers), _flat(published)
    keys = [*(key for key in _SIZES if key in ours), *(key for key in ours if key not in _SIZES)]
    for key in keys:
        if key.rpartition(".")[2] in _SILENT or ours[key] == theirs.get(key):
            continue
        if key not in theirs and key not in _SIZES:
            continue  # a key of another version
        if key == "num_query_groups" and numbers.get("mla"):
            continue  # as many as heads
        if key == "head_dim" and numbers.get("mla"):
            continue  # the sum of its parts
        yield key, ours[key], theirs.get(key)


def _flat(numbers: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in numbers.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in _flat(value).items()}
        else:
            flat[key] = value.value if hasattr(value, "value") else value
    return flat


def _is_cut(changes: Iterable[tuple[str, Any, Any]]) -> bool:
    """Whether every change makes the model smaller."""
    return all(_is_smaller(*change) for change in changes)


def _is_smaller(key: str, ours: Any, theirs: Any) -> bool:
    return key in _SIZES and isinstance(ours, int) and isinstance(theirs, int) and ours < theirs


def _cut(key: str, ours: int, theirs: int) -> str:
    return _SIZES[key].format(f"{ours:,} of {theirs:,}")


def _changed(key: str, ours: Any, theirs: Any) -> str:
    def words(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) and key in _SIZES else str(value)

    text = _SIZES[key].format(words(ours)) if key in _SIZES else f"{key} {words(ours)}"
    return f"{text} (published {'none' if theirs is None else words(theirs)})"


@cache
def _published(name: str) -> Mapping[str, Any] | None:
    """The numbers of a shipped model, including its file's defaults; None for other models."""
    files = {file.stem: file for file in (conf_dir() / "model").glob("*.yaml")}
    if name not in files:
        return None
    return asdict(_typed(yaml.safe_load(files[name].read_text(encoding="utf-8"))))


def _typed(numbers: Mapping[str, Any]) -> ModelConfig:
    """The section of a configuration as the dataclass; keys of other versions are dropped.

    Raises:
        TypeError: an invalid section.
    """
    values = _known(ModelConfig, numbers)
    for name, kind in _SECTIONS.items():
        if values.get(name) is not None:
            values[name] = kind(**_known(kind, values[name]))
    if values.get("mla") is not None and isinstance(values["mla"].yarn, Mapping):
        values["mla"].yarn = YarnConfig(**_known(YarnConfig, values["mla"].yarn))
    return ModelConfig(**values)


def _known(kind: type, numbers: Mapping[str, Any]) -> dict[str, Any]:
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return {key: value for key, value in numbers.items() if key in names}
