"""Converts a composed configuration to an `Experiment`, strictly.

A plain container is merged into the structured schema, so that an unknown key is an error even if it was added in Hydra
(`+key=`). Keys that depend on others are then filled in: the built-in sample has its own label, byte tokenizer and
vocabulary. `save` and `read` write and read a run folder's config.yaml, so a rank reads exactly what was validated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from enum import Enum, EnumType
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from quantexp.config.choices import groups
from quantexp.config.completing import complete_dataset, complete_start, with_num_processes
from quantexp.config.evaluation import evaluated_only
from quantexp.config.formats import fill_formats, user_folders
from quantexp.config.validate.data import validate_data
from quantexp.config.validate.experiment import validate
from quantexp.config.values import A_LIST, A_MAPPING, check_values, memory_of, wrong_type
from quantexp.errors import ConfigError, UnreadableError
from quantexp.quant.rules import fill_shares
from quantexp.reading.yaml_files import read_yaml_text
from quantexp.schema import (
    Composition,
    Experiment,
    SweepConfig,
)
from quantexp.schema.keys import OLD_KEYS, element_of, is_mapping, keys, kind_of, section_of
from quantexp.terminal.close_matches import did_you_mean, near

_Kind = TypeVar("_Kind", bound=Experiment)


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
    if "]" in parent:
        return _no_such_key(parent, name, owner)
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


def check_lists(value: Any, key: str = "") -> None:
    """Refuse an element of a list of sections, a rule or a part, that its schema does not take.

    Hydra and OmegaConf refuse it too, and say neither in which list it stands nor at which place.

    Raises:
        ConfigError: names the full key, `quant.rules[1].layers[0]`.
    """
    if isinstance(value, dict):
        for name, part in value.items():
            check_lists(part, f"{key}.{name}" if key else str(name))
    if not isinstance(value, list) or (owner := element_of(key)) is None:
        return
    for index, element in enumerate(value):
        place = f"{key}[{index}]"
        if not isinstance(element, dict):
            raise ConfigError(f"{place} {A_MAPPING}")
        check_lists(element, place)
        for name, part in element.items():
            kind = kind_of(f"{place}.{name}")
            if isinstance(part, dict) and get_origin(kind) is list:
                raise ConfigError(f"{place}.{name} {A_LIST}")
            if isinstance(part, list) and dataclasses.is_dataclass(kind):
                raise ConfigError(f"{place}.{name} {A_MAPPING}")
        try:
            OmegaConf.merge(_schema(owner), element)
        except OmegaConfBaseException as error:
            raise ConfigError(_message(error, f"{place}.")) from error


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        return {str(key): _resolved(config[key]) for key in config if key != "hydra"}
    except OmegaConfBaseException as error:
        raise ConfigError(_message(error)) from error


def _resolved(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _structured(plain: dict[str, Any], kind: type[_Kind]) -> _Kind:
    """Convert a plain container to a dataclass.

    The values of a composed or recorded configuration have the declared types, and need no OmegaConf, which takes many
    times longer. It converts all others, or refuses them with the full key.
    """
    plain = plain | {key: memory_of(plain[key]) for key in ("memory",) if key in plain}
    try:
        return cast(_Kind, _exact(plain, kind))
    except _InexactError:
        return _whole(plain, kind)


class _InexactError(Exception):
    """A value that only OmegaConf may convert."""


def _exact(value: Any, kind: Any) -> Any:
    """A value of exactly a type; mappings become dataclasses, names members of an Enum, whole numbers floats.

    Raises:
        _InexactError: it is of another type, or a text that means something else to OmegaConf.
    """
    if dataclasses.is_dataclass(kind):
        hints = _hints(cast(type, kind))
        if type(value) is dict and value.keys() <= hints.keys():
            return kind(**{name: _exact(part, hints[name]) for name, part in value.items()})  # type: ignore[operator]
    elif kind is Any:
        containers: dict[type, Any] = {dict: dict[str, Any], list: list[Any]}
        return _exact(value, containers.get(type(value), type(value)))
    elif isinstance(kind, UnionType):
        others = [each for each in get_args(kind) if each is not NoneType]
        if value is None and len(others) < len(get_args(kind)):
            return None
        if len(others) == 1 or type(value) in others:
            return _exact(value, others[0] if len(others) == 1 else type(value))
    elif get_origin(kind) is list and type(value) is list:
        return [_exact(part, *get_args(kind)) for part in value]
    elif get_origin(kind) is dict and type(value) is dict:
        of_key, of_value = get_args(kind)
        return {_exact(key, of_key): _exact(part, of_value) for key, part in value.items()}
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is kind and not (kind is str and ("${" in value or value == "???")):
        return value
    elif isinstance(kind, EnumType) and type(value) is str and value in kind.__members__:
        return kind[value]
    raise _InexactError


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _schema(kind: type) -> DictConfig:
    """The structured configuration of a dataclass; merging copies it."""
    return cast(DictConfig, OmegaConf.structured(kind))


def _whole(plain: dict[str, Any], kind: type[_Kind]) -> _Kind:
    check_lists(plain)
    try:
        experiment = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(_message(error)) from error
    assert isinstance(experiment, kind)
    return experiment


def _message(error: OmegaConfBaseException, parent: str = "") -> str:
    key = parent + str(error.full_key or "")
    if isinstance(error, ConfigKeyError) and key:
        return unknown_key(key, error.object_type)
    first = str(error).splitlines()[0]
    if key and (wrong := wrong_type(key, first)):
        return wrong
    if "missing" in first.lower():
        return f"{key} has no value; give {key}=..."
    return f"{key}: {first}" if key else first
