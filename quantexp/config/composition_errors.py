"""Converts exceptions of Hydra, OmegaConf and YAML to `ConfigError`: one line with the file, key, value and choices."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import OmegaConfBaseException

from quantexp.config.choices import choice_files, groups
from quantexp.config.load import unknown_key
from quantexp.config.overrides import unreadable
from quantexp.config.values import A_LIST, A_MAPPING, wrong_type
from quantexp.errors import ConfigError
from quantexp.folders import conf_dir
from quantexp.quant.scheme import SCHEMES
from quantexp.schema import Composition
from quantexp.schema.keys import is_mapping, kind_of, section_of
from quantexp.terminal.close_matches import did_you_mean, near, one_of

#: Hydra's message for a group without a choice.
_APPEND = re.compile(r"To append to your default list use (\+([^=\s]+)\S*)")
#: OmegaConf's message for a deleted group whose choice `config.yaml` uses to name another one.
_NO_CHOICE = re.compile(r"Interpolation key '(\w+)' not found")
#: OmegaConf's message for a mapping in place of a list, or the other way round.
_OTHER_SHAPE = "Cannot merge DictConfig with ListConfig"
NULL_SECTION = (
    "the chosen model has no such part: model.mla, model.mla.yarn and model.moe are null where a model has none, and "
    "keys below them cannot be set; choose another model, or give the whole part in a YAML file (model/NAME.yaml in a "
    "--config-dir)"
)


@contextlib.contextmanager
def clean_errors(config_dir: Path | None) -> Iterator[None]:
    """Convert errors of Hydra, OmegaConf and YAML to `ConfigError` with one line."""
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(_missing_choice(error, config_dir)) from error
    except OverrideParseException as error:
        raise ConfigError(unreadable(str(error.override))) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{' '.join(str(error).split())}; mend the YAML") from error
    except (ConfigCompositionException, HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_composition(error, config_dir)) from error
    except Exception as error:
        if not _raised_by_hydra(error):
            raise
        raise ConfigError(_unexpected(error)) from error


def _raised_by_hydra(error: BaseException) -> bool:
    """Whether Hydra raised an exception, itself or through the libraries that it called."""
    names = [
        str(frame.f_globals.get("__name__")).split(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    last = next((name for name in reversed(names) if name not in sys.stdlib_module_names), "")
    return last in ("hydra", "omegaconf", "antlr4", "packaging", "yaml")


def _unexpected(error: Exception) -> str:
    """The message for an exception that is not an error of Hydra or OmegaConf."""
    if isinstance(error, AssertionError | AttributeError) and "None" in str(error):
        return NULL_SECTION  # a key below a null section
    if isinstance(error, RecursionError):
        return f"the defaults of {_repeated_files(error)} lead back to themselves; mend `defaults`"
    reason = _first_line(error)
    return f"Hydra cannot compose the configuration: {reason[:1].lower()}{reason[1:]}"


def _repeated_files(error: RecursionError) -> str:
    """The choices whose `defaults` Hydra follows without an end, from the frames in which it does so."""
    paths = (frame.f_locals.get("path") for frame, _ in traceback.walk_tb(error.__traceback__))
    followed = [path for path in paths if isinstance(path, str)]
    return ", ".join(sorted(set(followed[-20:]))) or "a file"


def _missing_choice(error: MissingConfigException, config_dir: Path | None) -> str:
    missing = str(error.missing_cfg_file)
    if not error.options:
        return _first_line(error)
    reason = missing_choice(missing, error.options, config_dir)
    file = _file_of(str(error), config_dir)
    own = file is not None and config_dir is not None and Path(file).is_relative_to(config_dir)
    return f"{file}: {reason}" if own else reason


def missing_choice(missing: str, options: Sequence[str], config_dir: Path | None) -> str:
    """The message for a choice that does not exist, with similar choices.

    Args:
        missing: the group and the choice, `quant/FA_mxfp9`.
        options: the choices directly in the group's folder; choices in subfolders are suggested too.
        config_dir: the user's folder.
    """
    group = max((g for g in groups() if missing.startswith(f"{g}/")), key=len, default="")
    if not group:
        group, _, choice = missing.rpartition("/")
    else:
        choice = missing.removeprefix(f"{group}/")
    names = [*choice_files(group, config_dir)] or [*options]
    holding = [name for name in names if name.endswith(f"_{choice}")]
    holding = [name for name in holding if "/" not in name] or holding
    if len(holding) > 1:
        order = [*SCHEMES, *holding]
        meanings = one_of(sorted(holding, key=order.index))
        return f"{group}={choice} may mean {meanings}; choose one (quantexp list schemes)"
    close = did_you_mean(holding or near(choice, names))
    return (
        f"{group}={choice}: no such choice; {close and f'{close} '}available: {', '.join(sorted(options))}"
        f"{_nested(group, names)}"
    )


def _nested(group: str, names: Sequence[str]) -> str:
    nested = sum("/" in name for name in names)
    return (
        f" and {nested} more in folders: quantexp list schemes"
        if group == "quant" and nested
        else ""
    )


def _composition(error: Exception, config_dir: Path | None) -> str:
    """One line from a chain of exceptions: the innermost names the key, the outermost the file."""
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    if isinstance(inner, ConfigCompositionException) and inner.__context__ is not None:
        inner = inner.__context__  # errors in a file have a context but no cause
    owner = getattr(inner, "object_type", None)
    key = str(getattr(inner, "full_key", None) or "")
    reason = _first_line(inner)
    if "does not support deletion" in reason:
        return f"~{key} cannot be deleted: every key has a value; set another one, or drop the word"
    if key == "_dummy_" and (group := _NO_CHOICE.search(reason)):
        reason = f"{group[1]} has no choice; give {group[1]}=NAME, or drop ~{group[1]}"
        key = ""
    if append := _APPEND.search(str(inner)):
        reason = f"{append[2]}: there is no choice to replace; to add one, write {append[1]}"
    file = _file_of(str(error), config_dir)
    if key and _OTHER_SHAPE in reason:
        reason = f"{key} {A_LIST if owner is list else A_MAPPING}"
    elif not key and file and (wrong := _wrong_shape(Path(file), _group_of(str(error)))):
        reason = wrong
    elif key and ("not in" in reason):
        reason = unknown_key(key, owner)
    elif key and (wrong := wrong_type(key, reason)):
        reason = wrong
    elif key and key not in reason:
        reason = f"{key}: {reason}"
    return f"{file}: {reason}" if file else reason


def _group_of(message: str) -> str:
    """The group of the file that a message of the form `In 'quant/mine': ...` names."""
    return message.split("'")[1].rpartition("/")[0]


def _file_of(message: str, config_dir: Path | None) -> str | None:
    """The YAML file that a message of the form `In 'quant/mine': ...` names."""
    if not message.startswith("In '"):
        return None
    name = message.split("'")[1]
    folders = [f for f in (config_dir, conf_dir()) if f is not None]
    return next((str(f / f"{name}.yaml") for f in folders if (f / f"{name}.yaml").is_file()), name)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _wrong_shape(file: Path, group: str) -> str | None:
    """The message for the first value of a file of a group (`quant`, `quant/linear`) that is no list, or no mapping.

    None without one. OmegaConf refuses such a file and names no key.
    """
    text = file.read_text(encoding="utf-8-sig")
    owner: Any = Composition
    parents: list[str] = []
    for part in [] if "# @package _global_" in text else group.split("/"):
        if (section := section_of(owner, part)) is not None:
            owner, parents = section, [*parents, part]
    values = yaml.safe_load(text)
    return _wrong_below(values, owner, parents) if isinstance(values, dict) else f"it {A_MAPPING}"


def _wrong_below(values: Mapping[str, Any], owner: Any, parents: list[str]) -> str | None:
    for name, value in values.items():
        path = [*parents, str(name)]
        key, section = ".".join(path), section_of(owner, str(name))
        if get_origin(kind_of(key)) is list and isinstance(value, Mapping):
            return f"{key} {A_LIST}"
        if section is None and not is_mapping(owner, str(name)):
            continue
        if value is not None and not isinstance(value, Mapping):
            return f"{key} {A_MAPPING}"
        if section and value and (wrong := _wrong_below(value, section, path)):
            return wrong
    return None
