"""Composes an experiment from command-line overrides with Hydra.

`compose` combines the shipped configuration, the user's folder, the environment variables and the overrides into one
experiment; `quantexp.config.sweep.points` does the same for every point of a sweep. Exceptions of Hydra become
`ConfigError`, in one line that names the key, the value and the allowed values.
"""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quantexp.config.cached_loader import cache_files
from quantexp.config.choices import choice_files, groups, hidden_files, is_shipped
from quantexp.config.environment import environment_overrides
from quantexp.config.launchers import check_launcher
from quantexp.config.load import load, load_sweep, located, unknown_key, wrong_type
from quantexp.config.overrides import numbers_as_typed, quoted, readable, unreadable
from quantexp.config.published_choice import with_published_choice, words_to_choose_by
from quantexp.config.trackers import check_installed
from quantexp.errors import ConfigError
from quantexp.folders import conf_dir
from quantexp.quant.scheme import SCHEMES, content_hash, derived_name
from quantexp.runs.redaction import refuse_secrets
from quantexp.schema import Composition, Experiment, QuantConfig
from quantexp.terminal.close_matches import did_you_mean, near, one_of

#: Hydra's message for a group without a choice.
_APPEND = re.compile(r"To append to your default list use (\+([^=\s]+)\S*)")
#: OmegaConf's message for a deleted group whose choice `config.yaml` uses to name another one.
_NO_CHOICE = re.compile(r"Interpolation key '(\w+)' not found")
_NULL_SECTION = (
    "the chosen model has no such part: model.mla, model.mla.yarn and model.moe are null where a model has none, and "
    "keys below them cannot be set; choose another model, or give the whole part in a YAML file (model/NAME.yaml in a "
    "--config-dir)"
)
#: The name of the data classes in config.yaml.
_SCHEMA = "schema"


@contextlib.contextmanager
def configuration(config_dir: Path | None) -> Iterator[list[str]]:
    """Initialise Hydra with the shipped configuration and the user's folder; yields the overrides this needs.

    Raises:
        ConfigError: Hydra or OmegaConf refused something, in one line, or the folder does not exist.
    """
    extra = []
    if config_dir is not None:
        if not config_dir.is_dir():
            raise ConfigError(f"--config-dir must be a folder, got {str(config_dir)!r}")
        for file in hidden_files(config_dir):
            raise ConfigError(
                f"{file} has the name of a shipped file, which would be taken instead; give it another name"
            )
        extra.append(_searchpath([f"file://{config_dir.absolute()}"]))
    _store_schema()
    GlobalHydra.instance().clear()
    _plain_scheme.cache_clear()
    with (
        clean_errors(config_dir),
        initialize_config_dir(str(conf_dir().absolute()), version_base="1.3"),
    ):
        cache_files(GlobalHydra.instance().config_loader())
        yield extra


def _store_schema() -> None:
    """Store the schema once in a process: building it from the data classes takes as long as a composition."""
    store = ConfigStore.instance()
    if f"{_SCHEMA}.yaml" not in store.repo:
        store.store(name=_SCHEMA, node=Composition)


def compose(
    overrides: list[str],
    config_dir: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Experiment:
    """Compose and validate one experiment.

    Raises:
        ConfigError: the overrides do not describe a valid experiment.
    """
    readable_overrides = readable(overrides)
    with numbers_as_typed(overrides), configuration(config_dir) as extra:
        words = [*readable_overrides, *environment_overrides(readable_overrides, environment)]
        _refuse_several_values(words)
        config = composed([*extra, *words])
        _refuse_sweep(config)
        return finished(config)


def quick_test(
    overrides: list[str], config_dir: Path | None, environment: Mapping[str, str]
) -> Callable[[], Experiment | None]:
    """Composes the same run under `training=fast`; None where that is no experiment."""

    def composed_fast() -> Experiment | None:
        words = [word for word in overrides if not word.startswith("training=")]
        try:
            return compose([*words, "training=fast"], config_dir, environment)
        except ConfigError:
            return None

    return composed_fast


def _refuse_several_values(words: list[str]) -> None:
    """Refuse overrides with several values in a single run; Hydra's own message has several lines."""
    for override in OverridesParser.create().parse_overrides(words):
        if override.is_sweep_override():
            key = override.get_key_element()
            other = f", or write {key}=[a,b] for a list and {key}='a,b' for text"
            simple = override.value_type is ValueType.SIMPLE_CHOICE_SWEEP
            raise ConfigError(
                f"{override.input_line} holds several values: add -m to run them all{other if simple else ''}"
            )


def _refuse_sweep(config: DictConfig) -> None:
    """Refuse the options of a sweep, which do nothing in a single run."""
    options = {f"sweep.{key}": value for key, value in asdict(load_sweep(config)).items()}
    options["hydra.sweeper.params"] = config.hydra.sweeper.get("params")
    for key, value in options.items():
        if value is not None:
            raise ConfigError(f"{key} is for a sweep, got {value}; add -m, or drop it")


def finished(config: DictConfig) -> Experiment:
    """The experiment of a composed point, with the scheme's derived name; call it inside `configuration`."""
    experiment = load(config)
    _refuse_what_the_sample_decides(experiment, list(config.hydra.overrides.task))
    refuse_secrets(asdict(experiment))
    check_installed(experiment.tracking)
    check_launcher(experiment.launcher)
    experiment.quant.name = scheme_name(experiment.quant, config.hydra)
    return experiment


def _refuse_what_the_sample_decides(experiment: Experiment, overrides: list[str]) -> None:
    """Refuse overrides of tokenizer and vocabulary for the built-in sample, which has its own."""
    for override in overrides:
        key = override.lstrip("+").split("=")[0]
        if experiment.dataset.sample and key in ("model.vocab_size", "dataset.tokenizer"):
            raise ConfigError(
                f"{override} cannot hold with the built-in sample, which has a byte tokenizer of "
                f"{experiment.model.vocab_size} ids; give dataset.path too, or drop it"
            )


def composed(words: list[str]) -> DictConfig:
    """Compose overrides with Hydra; with `model.from_hf`, the published model replaces the chosen one.

    The model's other keys from a preset, an experiment or an override apply to it as to any choice. Call it inside
    `configuration`.

    Raises:
        ConfigError: the published configuration cannot be read, or another model is chosen too.
    """
    first = words_to_choose_by(words)
    config = hydra_compose("config", first, return_hydra_config=True)
    if config.model.get("from_hf") is None:
        return config
    chosen = with_published_choice(words, config)
    return hydra_compose("config", chosen, return_hydra_config=True)


def scheme_name(quant: QuantConfig, hydra: DictConfig) -> str:
    """The name of a scheme: its file's name if no override changes it, else a name derived from its slots.

    A file's name is the value of its `name:`, or the file name. Of the shipped schemes only those in `more/` have one;
    the ten schemes, and compositions of their parts, have derived names.
    """
    own_name, derived = quant.name, derived_name(quant)
    choice = hydra.runtime.choices.get("quant")
    named_by_file = own_name is None and isinstance(choice, str) and choice not in SCHEMES
    if own_name in (None, derived) and not named_by_file:
        return derived
    choice = str(choice)
    plain = _plain_scheme(choice, tuple(hydra.searchpath))
    if plain.name != own_name:
        raise ConfigError(
            f"quant.name cannot be set to {own_name!r}: the name follows from the scheme, here {derived}; put "
            "the scheme in a YAML file of your own (quant/NAME.yaml in a --config-dir) to name it"
        )
    if content_hash(plain) != content_hash(quant):
        return derived
    name = choice.rpartition("/")[2] if own_name is None else own_name
    if name == derived:
        return name
    if name in SCHEMES or (is_shipped("quant", f"more/{name}") and choice != f"more/{name}"):
        raise ConfigError(
            f"quant.name {name!r} is a shipped scheme and this composition is another ({derived}); "
            "choose another name for the file, or for its `name:`"
        )
    return name


@cache
def _plain_scheme(choice: str, searchpath: tuple[str, ...]) -> QuantConfig:
    """The scheme of a file without overrides; composed once inside a `configuration`."""
    plain = hydra_compose("config", [_searchpath([*searchpath]), f"quant={choice}"]).quant
    scheme = OmegaConf.to_object(plain)
    assert isinstance(scheme, QuantConfig)
    return scheme


def _searchpath(folders: list[str]) -> str:
    return f"hydra.searchpath=[{','.join(map(quoted, folders))}]"


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
    except (
        AssertionError,
        AttributeError,
    ) as error:  # raised by OmegaConf for a key below a null section
        if "NoneType" not in str(error) or not _raised_by("omegaconf", error):
            raise
        raise ConfigError(_NULL_SECTION) from error


def _raised_by(package: str, error: BaseException) -> bool:
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(frame.f_globals.get("__name__")).split(".")[0] == package


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
    key = located(str(getattr(inner, "full_key", None) or ""), owner)
    reason = _first_line(inner)
    if "does not support deletion" in reason:
        return f"~{key} cannot be deleted: every key has a value; set another one, or drop the word"
    if key == "_dummy_" and (group := _NO_CHOICE.search(reason)):
        reason = f"{group[1]} has no choice; give {group[1]}=NAME, or drop ~{group[1]}"
        key = ""
    if append := _APPEND.search(str(inner)):
        reason = f"{append[2]}: there is no choice to replace; to add one, write {append[1]}"
    if key and ("not in" in reason):
        reason = unknown_key(key, owner)
    elif key and (wrong := wrong_type(key, reason)):
        reason = wrong
    elif key and key not in reason:
        reason = f"{key}: {reason}"
    file = _file_of(str(error), config_dir)
    return f"{file}: {reason}" if file else reason


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
