"""From a composed configuration to an `Experiment`, strictly.

A plain container is merged into the structured schema, so that a key the schema does not have is an error even where
Hydra was told to add it (`+key=`). What depends on other keys is then filled in: the built-in sample brings its
label, byte tokenizer and vocabulary. `save` and `read` are a run folder's config.yaml: what a rank reads is what
was validated.
"""

from __future__ import annotations

import dataclasses
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from quantexp.errors import ConfigError
from quantexp.schema import Experiment, Rule, TokenizerKind
from quantexp.status import write_whole
from quantexp.validate import validate

#: How OmegaConf says that a value has the wrong type, and what the types are called here.
_TYPE_ERROR = re.compile(
    r"Value '(?P<given>.*)' (of type '.*' could not be converted to|is not a valid) (?P<wanted>\w+)"
)
_KINDS = {"Float": "a number", "Integer": "a whole number", "bool": "true or false"}
#: Bytes and the end of a document.
BYTE_VOCAB_SIZE = 257


def load(config: DictConfig) -> Experiment:
    """The experiment of a composed configuration, complete and validated.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, by its full key.
    """
    plain = _plain(config)
    plain.pop("hydra", None)
    experiment = _structured(plain)
    _complete_dataset(experiment)
    validate(experiment)
    return experiment


def save(experiment: Experiment, file: Path) -> None:
    """Write the resolved configuration; `read` gives the same experiment back."""
    container = OmegaConf.to_container(OmegaConf.structured(experiment), enum_to_str=True)
    write_whole(file, OmegaConf.to_yaml(OmegaConf.create(container)))


def read(file: Path) -> Experiment:
    """The experiment of a run folder.

    Raises:
        ConfigError: the file is not a whole configuration of this version.
    """
    try:
        config = OmegaConf.load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{file} is no configuration; run the experiment again")
    experiment = _structured(_plain(config))
    validate(experiment)
    return experiment


def unknown_key(full_key: str, owner: Any = None) -> str:
    """The message for a key the schema does not have, with what stands there or is near.

    Of a key in a list OmegaConf knows the last part alone, and the dataclass that has no such key.
    """
    parent, _, name = full_key.rpartition(".")
    if owner is Rule:
        return _no_such_key("quant.rules[]", name, Rule)
    node: Any = Experiment
    for part in filter(None, parent.split(".")):
        fields = {f.name: f for f in dataclasses.fields(node)}
        factory = fields[part].default_factory if part in fields else None
        if not isinstance(factory, type) or not dataclasses.is_dataclass(factory):
            return f"unknown key {full_key}"
        node = factory
    return _no_such_key(parent, name, node)


def _no_such_key(parent: str, name: str, owner: Any) -> str:
    names = [f.name for f in dataclasses.fields(owner)]
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    key = f"{parent}.{name}" if parent else name
    return f"unknown key {key}; {hint}allowed in {parent or 'the root'}: {', '.join(names)}"


def wrong_type(key: str, omegaconf_says: str) -> str | None:
    """The message for a value of the wrong type, where OmegaConf's says that; else None."""
    typed = _TYPE_ERROR.search(omegaconf_says)
    if typed is None or typed["wanted"] not in _KINDS:
        return None
    return f"{key} must be {_KINDS[typed['wanted']]}, got {typed['given']!r}"


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(
            OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"]), resolve=True
        )
    except OmegaConfBaseException as error:
        raise ConfigError(_message(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _structured(plain: dict[str, Any]) -> Experiment:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Experiment), plain)
        experiment = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_message(error)) from error
    assert isinstance(experiment, Experiment)
    return experiment


def _message(error: OmegaConfBaseException) -> str:
    key = str(error.full_key or "")
    if isinstance(error, ConfigKeyError) and key:
        return unknown_key(key, error.object_type)
    first = str(error).splitlines()[0]
    if key and (wrong := wrong_type(key, first)):
        return wrong
    if "missing" in first.lower():
        return f"{key} has no value; give {key}=..."
    return f"{key}: {first}" if key else first


def _complete_dataset(experiment: Experiment) -> None:
    dataset = experiment.dataset
    if dataset.label is not None:
        raise ConfigError(
            f"dataset.label follows from the dataset and cannot be set, got {dataset.label!r}"
        )
    dataset.sample = dataset.sample and dataset.path is None
    if dataset.sample:
        if dataset.tokenizer_path is not None:
            raise ConfigError(
                f"dataset.tokenizer_path={dataset.tokenizer_path} cannot hold with the built-in sample, which has a "
                "byte tokenizer; give dataset.path too, or drop it"
            )
        dataset.tokenizer = TokenizerKind.byte
        experiment.model.vocab_size = BYTE_VOCAB_SIZE
    dataset.label = f"{dataset.name} (built-in sample)" if dataset.sample else dataset.name
