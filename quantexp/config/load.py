"""Converts a composed configuration to an `Experiment`, strictly.

A plain container is merged into the structured schema, so that an unknown key is an error even if it was added in Hydra
(`+key=`). Keys that depend on others are then filled in: the built-in sample has its own label, byte tokenizer and
vocabulary. `save` and `read` write and read a run folder's config.yaml, so a rank reads exactly what was validated.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from quantexp.config.choices import groups
from quantexp.config.completing import complete_dataset, complete_start, with_num_processes
from quantexp.config.evaluation import evaluated_only
from quantexp.config.formats import fill_formats, user_folders
from quantexp.config.validate.data import validate_data
from quantexp.config.validate.experiment import validate
from quantexp.config.values import check_values, memory_of
from quantexp.errors import ConfigError, UnreadableError
from quantexp.quant.rules import fill_shares
from quantexp.reading.yaml_files import read_yaml_text
from quantexp.schema import (
    CaptureRule,
    Composition,
    Experiment,
    Part,
    Rule,
    SweepConfig,
    When,
)
from quantexp.schema.keys import OLD_KEYS, is_mapping, keys, section_of
from quantexp.schema.limits import FACTOR
from quantexp.terminal.close_matches import did_you_mean, near

#: OmegaConf's message for a value of the wrong type, and the names of the types in messages.
_TYPE_ERROR = re.compile(
    r"Value '(?P<given>.*)' (of type '.*' could not be converted to|is not a valid) (?P<wanted>\w+)"
)
#: Its message for a value outside a fixed set.
_CHOICE_ERROR = re.compile(r"Invalid value '(?P<given>.*)', expected one of \[(?P<wanted>.*)\]")
_KINDS = {"Float": "a number", "Integer": "a whole number", "bool": "true or false"}
#: Its message for a value of `pre_scale`, the only key of two types.
_PART_ERROR = re.compile(r"Value '(?P<given>.*)' of type '.*' is incompatible with type hint")
_Kind = TypeVar("_Kind", bound=Experiment)
#: Parts of its messages for a missing list, and for a missing dictionary.
_NO_LIST, _NO_MAPPING = "is not a ListConfig", "is not a subclass of"
#: Data classes that are elements of a list -> the key of the list.
_RULES: dict[Any, str] = {
    Rule: "quant.rules[]",
    CaptureRule: "capture.rules[]",
    Part: "quant.<slot>.parts[]",
    When: "quant.rules[].when",
}


def load(config: DictConfig) -> Experiment:
    """The experiment of a composed configuration, complete and validated.

    Raises:
        ConfigError: names the full key of an unknown key, or of a value of the wrong type or out of range.
    """
    content = _plain(config)
    check_values(content)
    composition = _structured(content, Composition)
    validate_data(composition.dataset)
    fill_formats(composition.quant, [composition.capture.format], user_folders(config))
    fill_shares(composition.quant, composition.training.iterations)
    complete_dataset(composition)
    complete_start(composition)
    composition.analysis.auto = composition.analysis.auto.lower()
    parts = {f.name: getattr(composition, f.name) for f in dataclasses.fields(Experiment)}
    experiment = with_num_processes(Experiment(**parts))
    if experiment.parallel.auto:
        from quantexp.config.auto_layout import with_layout

        experiment = with_layout(experiment)
    experiment = evaluated_only(experiment)
    validate(experiment)
    return experiment


def load_sweep(config: DictConfig) -> SweepConfig:
    """The sweep options of a composed configuration, which need not be a complete experiment.

    Raises:
        ConfigError: names the full key of an unknown key, or of a value of the wrong type.
    """
    try:
        plain = OmegaConf.to_container(config.sweep, resolve=True)
        merged = OmegaConf.merge({"sweep": _schema(SweepConfig)}, {"sweep": plain})
        sweep = OmegaConf.to_object(merged.sweep)
    except OmegaConfBaseException as error:
        raise ConfigError(_message(error)) from error
    assert isinstance(sweep, SweepConfig)
    return sweep


def save(experiment: Experiment, file: Path) -> None:
    """Write the resolved configuration; `read` returns the same experiment."""
    from quantexp.runs.disk import write_whole  # composing writes nothing

    write_whole(file, yaml.dump(plain(experiment), Dumper=_Dumper, sort_keys=False, width=1000))


def plain(experiment: Experiment) -> dict[str, Any]:
    """The experiment as plain dictionaries and lists; `from_plain` returns the same experiment."""
    return dataclasses.asdict(experiment, dict_factory=_named)


def _named(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: _name_of(value) for key, value in items}


def _name_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_name_of(each) for each in value]
    return value.name if isinstance(value, Enum) else value


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes YAML for OmegaConf, which reads 1e5 as a number, unlike YAML itself."""


def _represent_str(dumper: _Dumper, text: str) -> yaml.Node:
    try:
        float(text)
        style = "'"
    except ValueError:
        style = None
    node: yaml.Node = dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
    return node


_Dumper.add_representer(str, _represent_str)


def from_plain(content: dict[str, Any]) -> Experiment:
    """The experiment of plain dictionaries and lists.

    Raises:
        ConfigError: the content is not a complete configuration of this version.
    """
    experiment = _structured(content, Experiment)
    fill_shares(experiment.quant, experiment.training.iterations)
    validate(experiment)
    return experiment


def with_overrides(experiment: Experiment, overrides: Sequence[str]) -> Experiment:
    """The experiment with changed values (`key=value`).

    Raises:
        ConfigError: names an unknown key, or a value of the wrong type or out of range.
    """
    if not overrides:
        return experiment
    try:
        changes = OmegaConf.from_dotlist(list(overrides))
        merged = OmegaConf.merge(OmegaConf.structured(Experiment), plain(experiment), changes)
        container = OmegaConf.to_container(merged, enum_to_str=True)
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{' '.join(overrides)}: {first}") from error
    assert isinstance(container, dict)
    return from_plain({str(key): value for key, value in container.items()})


def read(file: Path) -> Experiment:
    """The experiment of a run folder's config.yaml.

    Raises:
        ConfigError: the file is not a complete configuration of this version.
    """
    try:
        config = OmegaConf.create(read_yaml_text(file))
    except UnreadableError as error:
        raise ConfigError(str(error)) from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{file} is not a configuration; run the experiment again")
    return from_plain(_plain(config))


def unknown_key(full_key: str, owner: Any = None) -> str:
    """The message for a key that the schema does not have, with the existing or similar keys.

    Args:
        full_key: the result of `located`.
        owner: the dataclass without this key, if it is known.
    """
    parent, _, name = full_key.rpartition(".")
    if owner in _RULES:
        return _no_such_key(_RULES[owner], name, owner)
    node: Any = Experiment if owner is Experiment else Composition
    for part in filter(None, parent.split(".")):
        if is_mapping(node, part):
            return f"unknown key {full_key}; write +{full_key}=... to add it"
        node = section_of(node, part)
        if node is None:
            return f"unknown key {full_key}"
    return _no_such_key(parent, name, node)


def _no_such_key(parent: str, name: str, owner: Any) -> str:
    names = [f.name for f in dataclasses.fields(owner)]
    if "/" in name:
        return f"there is no group {name}; {_hint(name, groups())}groups: {', '.join(groups())}"
    elsewhere = [] if owner is not Composition else [*keys(), *groups()]
    elsewhere.sort(key=lambda key: not key.startswith("training."))
    key = f"{parent}.{name}" if parent else name
    return (
        f"unknown key {key}; {_hint(name, [*names, *elsewhere])}allowed in {parent or 'the root'}: "
        f"{', '.join(names)}"
    )


def _hint(name: str, names: Iterable[str]) -> str:
    old = [OLD_KEYS[name]] if name in OLD_KEYS else None
    close = did_you_mean(old or near(name, dict.fromkeys(names)))
    return f"{close} " if close else ""


def located(key: str, owner: Any) -> str:
    """The full key; for a key inside a list, OmegaConf reports only the last part and the dataclass."""
    if owner is When:
        key = key.removeprefix("when.")
    return f"{_RULES[owner]}.{key}" if owner in _RULES and "." not in key else key


def wrong_type(key: str, omegaconf_says: str) -> str | None:
    """The message for a value of the wrong type; None if OmegaConf's message is about something else."""
    if _NO_LIST in omegaconf_says:
        return f"{key} must be a list, in brackets"
    if _NO_MAPPING in omegaconf_says:
        return f"{key} must be keys with values, in braces"
    if choice := _CHOICE_ERROR.search(omegaconf_says):
        close = did_you_mean(near(choice["given"], choice["wanted"].split(", ")))
        return f"{key} must be one of {choice['wanted']}, got {choice['given']!r}{close and f'; {close}'}"
    if part := _PART_ERROR.search(omegaconf_says):
        return f"{key} {FACTOR.requirement}, got {part['given']!r}"
    typed = _TYPE_ERROR.search(omegaconf_says)
    if typed is None or typed["wanted"] not in _KINDS:
        return None
    return f"{key} must be {_KINDS[typed['wanted']]}, got {typed['given']!r}"


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        return {str(key): _resolved(config[key]) for key in config if key != "hydra"}
    except OmegaConfBaseException as error:
        raise ConfigError(_message(error)) from error


def _resolved(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _structured(plain: dict[str, Any], kind: type[_Kind]) -> _Kind:
    """Convert a plain container to a dataclass.

    The points of a sweep share most sections, so each section is converted by itself and cached. If that fails, or if a
    section is invalid, the whole container is converted, because its messages have the full keys.
    """
    plain = plain | {key: memory_of(plain[key]) for key in ("memory",) if key in plain}
    fields = {f.name: f for f in dataclasses.fields(kind)}
    parts: dict[str, Any] = {}
    try:
        for key, value in plain.items():
            section, default = fields[key].default_factory, fields[key].default
            if isinstance(value, dict) and isinstance(section, type):
                parts[key] = copy.deepcopy(_section(section, _Section(repr(value), value)))
            elif type(value) is type(default) or key == "memory":
                parts[key] = value
            elif isinstance(default, Enum) and isinstance(value, str):
                parts[key] = type(default)[value]
            else:
                return _whole(plain, kind)
    except (KeyError, OmegaConfBaseException):
        return _whole(plain, kind)
    return kind(**parts) if set(parts) == set(fields) else _whole(plain, kind)


@dataclass(frozen=True)
class _Section:
    """A plain container whose cache key is its text, which shows types and order."""

    text: str
    content: dict[str, Any] = field(compare=False)


@lru_cache(maxsize=256)
def _section(kind: type, section: _Section) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(_schema(kind), section.content))


@cache
def _schema(kind: type) -> DictConfig:
    """The structured configuration of a dataclass; merging copies it."""
    return cast(DictConfig, OmegaConf.structured(kind))


def _whole(plain: dict[str, Any], kind: type[_Kind]) -> _Kind:
    try:
        experiment = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(_message(error)) from error
    assert isinstance(experiment, kind)
    return experiment


def _message(error: OmegaConfBaseException) -> str:
    key = located(str(error.full_key or ""), error.object_type)
    if isinstance(error, ConfigKeyError) and key:
        return unknown_key(key, error.object_type)
    first = str(error).splitlines()[0]
    if key and (wrong := wrong_type(key, first)):
        return wrong
    if "missing" in first.lower():
        return f"{key} has no value; give {key}=..."
    return f"{key}: {first}" if key else first
