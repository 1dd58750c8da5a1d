"""What a sweep varies: the overrides of each of its points. Nothing is composed but what all points share.

What the words fix is composed once, as Hydra does it for a multirun, to read what the configuration says about the
sweep itself: `sweep.*` and `hydra.sweeper.params`. Explicit points are the slowest axis, then come the words in their
order, then the seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from quantexp.config.environment import environment_overrides
from quantexp.config.load import load_sweep
from quantexp.config.overrides import readable
from quantexp.config.published_choice import words_to_choose_by
from quantexp.config.sweep.axes import Axis, Variant, axes, bare, zipped
from quantexp.config.sweep.listed import listed
from quantexp.config.sweep.request import Request, request
from quantexp.errors import ConfigError
from quantexp.schema import SweepConfig

SEED = "training.seed"


@dataclass(frozen=True)
class Expansion:
    """The points' overrides, and what holds for all of them."""

    request: Request
    #: The overrides of each point.
    variants: list[list[str]]
    #: What YAML files say about the sweep: the same in every point.
    shared: dict[str, Any]
    #: Overrides that take it away, for a point that is composed by itself.
    resets: list[str]
    #: Points that each entry of the file of explicit points stands for.
    num_each_entry: int

    def varied(self, index: int) -> list[str]:
        """The words in which a point may differ from others."""
        common = set(self.variants[0]).intersection(*self.variants)
        return [word for word in self.variants[index] if word not in common]


def expand(words: list[str], extra: list[str], environment: Mapping[str, str]) -> Expansion:
    """The variants of a multirun's words, in a stable order; inside `quantexp.config.compose.configuration`.

    Raises:
        ConfigError, HydraException: words that cannot be read, a key of `sweep` that cannot be.
    """
    about, others = _split(_parsed(words, extra))
    base = _base(others, extra)
    if params := _sweeper_params(base):
        words = [*params, *words]
        about, others = _split(_parsed(words, extra))
        base = _base(others, extra)
    whole = _base(others, extra, _replacing(about)) if about else base
    sweep, shared = load_sweep(whole), said_of_sweep(base)
    asked = request(sweep, whole.training.seed)

    found = axes(others)
    entries = listed(asked.points, list(found)) if asked.points else [{}]
    _refuse_two_seeds(sweep, found, entries)
    loops = [entries, *zipped(found, asked.zip), _seeds(asked)]
    own = environment_overrides(words, environment)
    for entry in entries:
        environment_overrides([*words, *entry.values()], environment)
    variants = [[*_joined(step).values(), *own] for step in product(*loops)]
    return Expansion(
        asked, variants, shared, _resets(shared, params), len(variants) // len(entries)
    )


def said_of_sweep(config: DictConfig) -> dict[str, Any]:
    """What a composition says about its sweep, as it was written."""
    said = OmegaConf.to_container(config.sweep)
    assert isinstance(said, dict)
    return {str(key): value for key, value in said.items()}


class _Choices:
    """The choices of a group, those of the user's own folder among them, where `glob` asks for them."""

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
    """What is about the sweep, and what is about its points."""
    about = [o for o in overrides if (o.key_or_group + ".").startswith("sweep.")]
    for override in about:
        if override.is_sweep_override():
            key = override.get_key_element()
            raise ConfigError(
                f"{override.input_line}: {key} is one for the whole sweep; write a list as {key}=[a,b]"
            )
    return about, [override for override in overrides if override not in about]


def _base(overrides: list[Override], extra: list[str], more: Sequence[str] = ()) -> DictConfig:
    """The composition of what is fixed; of a key that is given twice the last word counts."""
    last = {override.get_key_element(): override for override in overrides}
    fixed = [str(o.input_line) for o in last.values() if not o.is_sweep_override()]
    words = words_to_choose_by([*extra, *fixed, *more])
    return hydra_compose("config", words, return_hydra_config=True)


def _replacing(about: list[Override]) -> list[str]:
    """The words about the sweep, each replacing what a file says; by itself Hydra would merge mappings."""
    keys = [o.key_or_group for o in about if o.type is OverrideType.CHANGE]
    cleared = [f"{key}=null" for key in keys if key != "sweep"]
    return [*cleared, *(str(o.input_line) for o in about)]


def _sweeper_params(config: DictConfig) -> list[str]:
    """The words of `hydra.sweeper.params`: where a YAML file says what is swept."""
    sweeper = config.hydra.sweeper
    if sweeper.get("_target_") != f"{BasicSweeper.__module__}.{BasicSweeper.__name__}":
        raise ConfigError(f"hydra/sweeper must be basic, got {sweeper.get('_target_')}")
    words = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    for word in words:
        if bare(word).startswith("sweep."):
            raise ConfigError(f"hydra.sweeper.params: {word} belongs below `sweep:`")
    return readable(words)


def _refuse_two_seeds(
    sweep: SweepConfig, found: dict[str, Axis], entries: Iterable[Variant]
) -> None:
    """A number of seeds may begin at a fixed seed; beside anything else one of the two would do nothing."""
    if sweep.seeds is None:
        return
    words = [word for entry in entries for key, word in entry.items() if bare(key) == SEED]
    if isinstance(sweep.seeds, list) or len(found.get(SEED, [])) > 1:
        words += [word for variant in found.get(SEED, []) for word in variant.values()]
    if words:
        raise ConfigError(
            f"sweep.seeds={sweep.seeds} and {words[0]} both set {SEED}; give one of them"
        )


def _seeds(asked: Request) -> Axis:
    """The axis of the seeds; one empty variant where none are asked for."""
    return [{}] if asked.seeds is None else [{SEED: f"{SEED}={seed}"} for seed in asked.seeds]


def _joined(step: Iterable[Variant]) -> Variant:
    """One variant of each axis as one; a later one replaces a key in its place."""
    return {key: word for variant in step for key, word in variant.items()}


def _resets(shared: dict[str, Any], params: list[str]) -> list[str]:
    keys = [f"sweep.{key}" for key, value in shared.items() if value is not None]
    return [f"{key}=null" for key in [*keys, *(["hydra.sweeper.params"] if params else [])]]
