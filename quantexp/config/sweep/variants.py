"""Expands a sweep into the overrides of each point, without composing the points.

The fixed overrides are composed once, as Hydra does for a multirun, to read the sweep's own options `sweep.*` and
`hydra.sweeper.params`. Explicit points are the slowest axis, then the overrides in their order, then the seeds.

An explicit point is a mapping from override to value in a YAML list (`sweep.points`), one variant of the sweep. Values
are literal: a comma, a quote or a bracket in a string is part of the string and never a sweep; `${...}` refers to the
configuration, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    Override,
    OverrideType,
    Quote,
    QuotedString,
    Transformer,
)
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quantexp.config.cached_loader import check_yaml
from quantexp.config.environment import environment_overrides
from quantexp.config.hydra_internals import BasicSweeper
from quantexp.config.load import load_sweep
from quantexp.config.overrides import readable, words_to_choose_by
from quantexp.config.sweep.axes import Axis, Variant, axes, bare, check_count, zipped
from quantexp.config.sweep.request import Request, request
from quantexp.errors import ConfigError
from quantexp.schema import SweepConfig

SEED = "training.seed"
CHAOS = "training.chaos"
_FORM = "a list of mappings such as `- {quant: FA_mxfp8, training.lr: 1.0e-4}`"


@dataclass(frozen=True)
class Expansion:
    """The overrides of the points, and their common options."""

    request: Request
    #: The overrides of each point.
    variants: list[list[str]]
    #: The `sweep` section of the YAML files, equal in every point.
    shared: dict[str, Any]
    #: Overrides that reset that section, for a point that is composed by itself.
    resets: list[str]
    #: The number of points for each entry of the file of explicit points.
    points_per_entry: int

    def varied(self, index: int) -> list[str]:
        """The overrides in which a point may differ from others."""
        common = set(self.variants[0]).intersection(*self.variants)
        return [word for word in self.variants[index] if word not in common]


def expand(words: list[str], extra: list[str], environment: Mapping[str, str]) -> Expansion:
    """The variants of a multirun's overrides, in a stable order; call it inside `compose.configuration`.

    Raises:
        ConfigError, HydraException: an override cannot be read, or a key of `sweep` is invalid.
    """
    about, others = _split(_parsed(words, extra))
    base = _base(others, extra)
    if params := _sweeper_params(base):
        words = [*params, *words]
        about, others = _split(_parsed(words, extra))
        base = _base(others, extra)
    whole = _base(others, extra, _replacing(about)) if about else base
    sweep, shared = load_sweep(whole), sweep_section(base)
    options = request(sweep, whole.training.seed)

    swept = axes(others)
    entries = listed(options.points, list(swept)) if options.points else [{}]
    _refuse_two_seeds(sweep, swept, entries)
    _refuse_other_chaos(sweep, swept, entries, whole.training.chaos)
    loops = [entries, *zipped(swept, options.zip), _seeds(options)]
    number = prod(map(len, loops))
    check_count(number)
    from_environment = environment_overrides(words, environment)
    for entry in entries:
        environment_overrides([*words, *entry.values()], environment)
    points = [_joined(step) for step in product(*loops)]
    points += [baseline for baseline in _baselines(points, options.chaos) if baseline not in points]
    check_count(len(points))
    variants = [[*point.values(), *from_environment] for point in points]
    return Expansion(options, variants, shared, _resets(shared, params), number // len(entries))


def sweep_section(config: DictConfig) -> dict[str, Any]:
    """The `sweep` section of a composition, unresolved."""
    section = OmegaConf.to_container(config.sweep)
    assert isinstance(section, dict)
    return {str(key): value for key, value in section.items()}


class _Choices:
    """The choices of a group, including those of the user's folder, for `glob`."""

    def __init__(self, extra: list[str]):
        self.extra = extra

    def get_group_options(
        self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG
    ) -> list[str]:
        loader = GlobalHydra.instance().config_loader()
        return loader.get_group_options(group_name, results_filter, "config", self.extra)


def _parsed(words: list[str], extra: list[str]) -> list[Override]:
    choices = cast(ConfigLoader, _Choices(extra))
    return OverridesParser.create(config_loader=choices).parse_overrides(words)


def _split(overrides: list[Override]) -> tuple[list[Override], list[Override]]:
    """The overrides of the sweep's own options, and those of its points."""
    about = [o for o in overrides if (o.key_or_group + ".").startswith("sweep.")]
    for override in about:
        if override.is_sweep_override():
            key = override.get_key_element()
            raise ConfigError(
                f"{override.input_line}: {key} is one for the whole sweep; write a list as {key}=[a,b]"
            )
    return about, [override for override in overrides if override not in about]


def _base(overrides: list[Override], extra: list[str], more: Sequence[str] = ()) -> DictConfig:
    """The composition of the fixed overrides; the last override of a key counts."""
    last = {override.get_key_element(): override for override in overrides}
    fixed = [str(o.input_line) for o in last.values() if not o.is_sweep_override()]
    words = words_to_choose_by([*extra, *fixed, *more])
    return hydra_compose("config", words, return_hydra_config=True)


def _replacing(about: list[Override]) -> list[str]:
    """The overrides of the sweep's options, each replacing a file's value, where Hydra alone would merge mappings."""
    keys = [o.key_or_group for o in about if o.type is OverrideType.CHANGE]
    cleared = [f"{key}=null" for key in keys if key != "sweep"]
    return [*cleared, *(str(o.input_line) for o in about)]


def _sweeper_params(config: DictConfig) -> list[str]:
    """The overrides in `hydra.sweeper.params`, with which a YAML file defines a sweep."""
    sweeper = config.hydra.sweeper
    if sweeper.get("_target_") != f"{BasicSweeper.__module__}.{BasicSweeper.__name__}":
        raise ConfigError(f"hydra/sweeper must be basic, got {sweeper.get('_target_')}")
    words = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    for word in words:
        if bare(word).startswith("sweep."):
            raise ConfigError(f"hydra.sweeper.params: {word} belongs below `sweep:`")
    return readable(words)


def _refuse_two_seeds(
    sweep: SweepConfig, swept: dict[str, Axis], entries: Iterable[Variant]
) -> None:
    """Refuse two sources of seeds; only a number of seeds may be combined, with one fixed first seed."""
    if sweep.seeds is None:
        return
    words = [word for entry in entries for key, word in entry.items() if bare(key) == SEED]
    if isinstance(sweep.seeds, list) or len(swept.get(SEED, [])) > 1:
        words += [word for variant in swept.get(SEED, []) for word in variant.values()]
    if words:
        raise ConfigError(
            f"sweep.seeds={sweep.seeds} and {words[0]} both set {SEED}; give one of them"
        )


def _refuse_other_chaos(
    sweep: SweepConfig, swept: dict[str, Axis], entries: Iterable[Variant], fixed: int
) -> None:
    """Refuse perturbed weights beside `sweep.chaos`, whose bf16 runs would then all be perturbed."""
    variants = [*entries, *swept.get(CHAOS, []), *([{CHAOS: f"{CHAOS}={fixed}"}] if fixed else [])]
    words = [word for variant in variants for key, word in variant.items() if bare(key) == CHAOS]
    if sweep.chaos is not None and words:
        raise ConfigError(
            f"sweep.chaos={sweep.chaos} and {words[0]} both set {CHAOS}; give one of them"
        )


def _seeds(options: Request) -> Axis:
    """The axis of the seeds; one empty variant without `sweep.seeds`."""
    return [{}] if options.seeds is None else [{SEED: f"{SEED}={seed}"} for seed in options.seeds]


def _baselines(points: Sequence[Variant], chaos: int | None) -> list[Variant]:
    """Each point with bf16 in the place of its scheme, once, and again from each perturbation of initial weights."""
    if chaos is None:
        return []
    others = [
        {key: word for key, word in point.items() if not _is_of_a_scheme(key)} for point in points
    ]
    once = {tuple(other.items()): other for other in others}.values()
    return [
        {**other, "quant": "quant=bf16", **({CHAOS: f"{CHAOS}={number}"} if number else {})}
        for number in range(chaos + 1)
        for other in once
    ]


def _is_of_a_scheme(key: str) -> bool:
    return bare(key).replace("/", ".").partition(".")[0] == "quant"


def _joined(step: Iterable[Variant]) -> Variant:
    """Merge one variant of each axis; a later variant replaces a key in place."""
    return {key: word for variant in step for key, word in variant.items()}


def _resets(shared: dict[str, Any], params: list[str]) -> list[str]:
    keys = [f"sweep.{key}" for key, value in shared.items() if value is not None]
    return [f"{key}=null" for key in [*keys, *(["hydra.sweeper.params"] if params else [])]]


def listed(file: Path, swept: list[str]) -> Axis:
    """The variants of a file, in order; `swept` are the keys that the command line sweeps.

    Raises:
        ConfigError: names a file that cannot be read or is not a list of mappings, or the number of an entry with a
            key that the command line sets too.
    """
    entries = _entries(file)
    if not entries:
        raise ConfigError(f"{file}: no points; write {_FORM}")
    return [
        _variant_of_entry(f"{file}, entry {n}", entry, swept) for n, entry in enumerate(entries, 1)
    ]


def _entries(file: Path) -> list[Any]:
    try:
        check_yaml(file)
        content = OmegaConf.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"sweep.points: there is no file {file}") from error
    except (OSError, ValueError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, ListConfig):
        raise ConfigError(f"{file} must be {_FORM}")
    entries = OmegaConf.to_container(content)
    assert isinstance(entries, list)
    return entries


def _variant_of_entry(where: str, entry: Any, swept: list[str]) -> Variant:
    if not isinstance(entry, dict) or not entry:
        raise ConfigError(f"{where} must be a mapping of overrides to values, got {entry!r}")
    for key in map(str, entry):
        if bare(key).startswith(("hydra.", "hydra/", "sweep.")):
            raise ConfigError(f"{where}: {key} is one for the whole sweep; give it beside the file")
        if bare(key) in map(bare, swept):
            raise ConfigError(f"{where}: {key} is on the command line too; give it in one place")
    return {str(key): literal_word(str(key), value) for key, value in entry.items()}


def literal_word(key: str, value: Any) -> str:
    """The override that sets a key to exactly this value, with any special characters quoted."""
    return f"{key}={Transformer.str(_literal(value))}"


def _literal(value: Any) -> Any:
    if isinstance(value, str):
        return QuotedString(value, Quote.single)
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    return value
