"""Composes an experiment from command-line overrides with Hydra.

`compose` combines the shipped configuration, the user's folder, the environment variables and the overrides into one
experiment; `quantexp.config.sweep.points` does the same for every point of a sweep. Exceptions of Hydra become
`ConfigError`, in one line that names the key, the value and the allowed values.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, OmegaConf

from quantexp.config.cached_loader import cache_files
from quantexp.config.choices import hidden_files, is_shipped, require_folder
from quantexp.config.composition_errors import NULL_SECTION, clean_errors
from quantexp.config.environment import environment_overrides
from quantexp.config.formats import fill_formats, folders_of
from quantexp.config.in_force import (
    iterations_of,
    name_in_force,
    quantises,
    sites_in_force,
    without_idle_rules,
)
from quantexp.config.load import check_lists, load, load_sweep
from quantexp.config.overrides import numbers_as_typed, readable, words_to_choose_by
from quantexp.config.validate.tracking import check_installed, check_store
from quantexp.config.values import check_values
from quantexp.config.words import check_meaning, check_text
from quantexp.errors import ConfigError
from quantexp.folders import conf_dir, quoted
from quantexp.quant.label import is_unquantised
from quantexp.quant.scheme import SCHEMES, content_hash, derived_name
from quantexp.quant.slots import WORKING
from quantexp.runs.redaction import refuse_secrets
from quantexp.schema import Composition, Experiment, QuantConfig

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
        require_folder(config_dir)
        for file in hidden_files(config_dir):
            raise ConfigError(
                f"{file} has the name of a shipped file or format, which would be taken instead; give it another name"
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
    check_store(experiment.tracking)
    if experiment.launcher.options or not experiment.launcher.is_local:
        from quantexp.config.launchers import check_launcher

        check_launcher(experiment.launcher)
    sites = sites_in_force(experiment)
    if not quantises(experiment, sites) and not is_unquantised(derived_name(experiment.quant)):
        _refuse_an_idle_scheme(experiment, str(config.hydra.runtime.choices.get("quant")))
    experiment.quant.name = scheme_name(
        experiment.quant,
        name_in_force(experiment, sites),
        config.hydra,
        lambda quant: without_idle_rules(experiment, quant),
    )
    return experiment


def _refuse_an_idle_scheme(experiment: Experiment, choice: str) -> None:
    """Refuse a scheme that quantises something, and in the run's own iterations nothing: its name would be wrong."""
    name, model = choice.rpartition("/")[2], experiment.model
    if experiment.evaluate.only and not experiment.quant.rules:
        raise ConfigError(
            f"quant={name} leaves nothing quantised in the forward pass, which is all that an evaluation has; take "
            "another scheme"
        )
    first, last = iterations_of(experiment)
    subject = f"quant.rules of {name} leave" if experiment.quant.rules else f"quant={name} leaves"
    raise ConfigError(
        f"{subject} nothing quantised in the {model.num_layers} layers of {model.name} in iterations "
        f"{first} to {last}; take more layers (model.num_layers=), more iterations or other rules, or quant={WORKING}"
    )


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
    for override in map(_parsed, words):
        check_meaning(override)
        check_values(override.value(), override.key_or_group)
        check_lists(override.value(), override.key_or_group)
    first = words_to_choose_by(words)
    config = hydra_compose("config", first, return_hydra_config=True)
    if config.model.get("from_hf") is not None:
        from quantexp.config.published_choice import with_published_choice

        chosen = with_published_choice(words, config)
        config = hydra_compose("config", chosen, return_hydra_config=True)
    _refuse_lost_mappings(words, config)
    return config


def _refuse_lost_mappings(words: list[str], config: DictConfig) -> None:
    """Refuse keys for a section that is null: OmegaConf merges an empty mapping into it without an effect."""
    for override in map(_parsed, words):
        key = override.key_or_group
        if isinstance(override.value(), dict) and OmegaConf.select(config, key) is None:
            raise ConfigError(f"{override.input_line}: {NULL_SECTION}")


@lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    """The parsed override; the points of a sweep share most of theirs."""
    check_text(word)
    return OverridesParser.create().parse_override(word)


def scheme_name(
    quant: QuantConfig,
    derived: str,
    hydra: DictConfig,
    in_force: Callable[[QuantConfig], QuantConfig] = lambda quant: quant,
) -> str:
    """The name of a scheme: its file's name if no override changes it, else the name derived from what is quantised.

    A file's name is the value of its `name:`, or the file name. Of the shipped schemes only those in `more/` have one;
    the ten schemes, and compositions of their parts, have derived names. `in_force` leaves out rules that change
    nothing in the run, in which a file's scheme and the composed one may differ.
    """
    own_name = quant.name
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
    if content_hash(plain) != content_hash(quant) and not _same(plain, quant, in_force):
        return derived
    name = choice.rpartition("/")[2] if own_name is None else own_name
    if name == derived or is_unquantised(derived):
        return derived
    if name in SCHEMES or (is_shipped("quant", f"more/{name}") and choice != f"more/{name}"):
        raise ConfigError(
            f"quant.name {name!r} is a shipped scheme and this composition is another ({derived}); "
            "choose another name for the file, or for its `name:`"
        )
    return name


def _same(
    plain: QuantConfig, quant: QuantConfig, in_force: Callable[[QuantConfig], QuantConfig]
) -> bool:
    """Whether two schemes are one in the run; a file's scheme need not be valid in it."""
    try:
        return content_hash(in_force(plain)) == content_hash(in_force(quant))
    except ConfigError:
        return False


@cache
def _plain_scheme(choice: str, searchpath: tuple[str, ...]) -> QuantConfig:
    """The scheme of a file without overrides; composed once inside a `configuration`."""
    plain = hydra_compose("config", [_searchpath([*searchpath]), f"quant={choice}"]).quant
    scheme = OmegaConf.to_object(plain)
    assert isinstance(scheme, QuantConfig)
    fill_formats(scheme, [], folders_of(searchpath))
    return scheme


def _searchpath(folders: list[str]) -> str:
    return f"hydra.searchpath=[{','.join(map(quoted, folders))}]"
