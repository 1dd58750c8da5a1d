"""Extras: capabilities that the core finds by an entry point, and works without.

An extra is a package with an `Extra`, which an entry point in the group `quantexp.extras` names. Those of this project
are the folders of `quantexp/extras`. An extra imports the core; the core imports no extra. It asks for a verb by its
word, and for a function by a `Service`. An entry point whose package has been removed counts as not installed.

Reading the entry points of an environment takes 40 ms, which nothing does before it needs a verb or a service of an
extra.
"""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from quantexp.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "quantexp.extras"
#: What repairs an environment whose metadata is older than its source.
INSTALL = "pip install -e . registers the extras of an updated source"


@dataclass(frozen=True)
class Verb:
    """A verb of the command line."""

    #: One line in the list of verbs.
    about: str
    #: What follows the verb.
    usage: str
    #: What follows `quantexp`, each.
    examples: tuple[str, ...]
    #: More about it, in lines of at most 78 characters.
    more: str = ""
    #: The module whose `run(arguments)` executes it; None: that of `quantexp.cli` with the verb's name.
    module: str | None = None
    #: Adds arguments and flags to its parser; None: `quantexp.cli.flags` has them.
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
    #: The words that a shell may complete it with; None: overrides, or what `quantexp.cli.completion` has.
    words: tuple[str, ...] | None = None
    #: Whether a shell completes the names of runs too.
    takes_runs: bool = False


class Service(Enum):
    """What the core asks of an extra: the extra's name, and a function of the given type."""

    #: `(RunContext) -> None`: compares gradients instead of training (`gradient.only`).
    GRADIENT_RUN = "bisect", "gradient run"
    #: `(RunContext, run_passes, parts, scale, iteration) -> None`: compares gradients in another training loop.
    GRADIENT_COMPARISON = "bisect", "gradient comparison"
    #: `(RunContext) -> None`: evaluates instead of training (`evaluate.only`).
    EVALUATION_RUN = "evaluate", "evaluation run"
    #: `(RunDir) -> None`: draws the results of a run that evaluated.
    EVALUATION_FIGURE = "evaluate", "evaluation figure"
    #: `(Experiment) -> None`: refuses what the scheme's backend cannot run, or a recipe without an effect.
    BACKEND_CHECK = "transformer_engine", "backend check"
    #: `(Experiment) -> str | None`: what the backend lacks on the machine that would run it.
    BACKEND_LACKS = "transformer_engine", "backend lacks"
    #: `(Experiment, device) -> BackendPlan` of `quantexp.cli.plan_backend`; the device is a `DEVICE`, or None.
    BACKEND_PLAN = "transformer_engine", "backend plan"
    #: `(Experiment) -> {ModuleId: str}`: the recipe of each module in the first iteration.
    BACKEND_RECIPES = "transformer_engine", "backend recipes"
    #: `(Sequence[str]) -> object`: the device of these values of `device=NAME`.
    DEVICE = "transformer_engine", "device"
    #: `() -> Iterable[str]`: the names of devices.
    DEVICES = "transformer_engine", "devices"
    #: `() -> str`: what Transformer Engine can do here.
    BACKEND_SUPPORT = "transformer_engine", "backend support"
    #: `(ModelConfig, Backend) -> TransformerBlockSubmodules`: the decoder with Transformer Engine's linear layers.
    NATIVE_SPEC = "transformer_engine", "native spec"
    #: `() -> ModuleSpec | None`: Megatron-LM's layers, in its own loop.
    LAYER_SPEC = "megatron_lm", "layer spec"
    #: `(Sequence[str]) -> None`: runs Megatron-LM's script with these words.
    SCRIPT = "megatron_lm", "script"
    #: `(Path) -> (str | None) -> LmWeights`: reads an iteration of its checkpoint; None in place of it if it is none.
    READER = "megatron_lm", "reader"
    #: `(ModelConfig, weights, padding, Path, iteration) -> None`: writes its checkpoint.
    WRITER = "megatron_lm", "writer"
    #: `() -> type[TransformerBlock]`: the decoder of a new model, called before it is built.
    NATIVE_DECODER = "transformer_engine", "native decoder"
    #: `(ProductWatch, {ModuleId: Module}) -> AbstractContextManager[None]`: watches the products of these modules.
    NATIVE_WATCH = "transformer_engine", "native watch"
    #: `(as_json) -> int`: compares Transformer Engine's quantizers with the formats of the schemes.
    CONFORMANCE = "transformer_engine", "conformance"
    #: `(width) -> Iterator[(name, array, dtype)]`: tensors [rows, width] that are hard to quantise.
    HARD_TENSORS = "verify", "hard tensors"
    #: `(RunContext, text_of) -> RankDossiers` of `training.rank_dossiers`: the ring, and what is written of it.
    DOSSIERS = "forensics", "dossiers"
    #: `(Experiment, PrecisionMap) -> (bytes, bytes)`: the memory of all rings, and a dossier's values on disk.
    RING_PRICE = "forensics", "ring price"
    #: `(RunDir) -> list`: the dossiers of a run as `report/page/dossiers.html` shows them, the newest first.
    SHOWN_DOSSIERS = "forensics", "shown dossiers"

    @property
    def extra(self) -> str:
        """The name of the extra."""
        return self.value[0]


#: The extras of this project that serve the core, some of them numbers and their proof.
_OWN = frozenset(each.extra for each in Service)


@dataclass(frozen=True)
class Extra:
    """What an extra adds. Its module is imported for `quantexp --help`, so it imports no torch."""

    verbs: Mapping[str, Verb] = field(default_factory=dict)
    #: Service -> `module:function`, which is imported when the service is asked for.
    services: Mapping[Service, str] = field(default_factory=dict)


@cache
def _points() -> dict[str, EntryPoint]:
    """The entry points by name.

    Raises:
        ConfigError: two packages register one name, or one that is this project's: a run would not say which served.
    """
    from importlib.metadata import entry_points

    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        own = f"quantexp.extras.{point.name}:EXTRA"
        expected = own if point.name in _OWN else points.get(point.name, point).value
        if point.value != expected:
            raise ConfigError(
                f"an installed package registers {point.value} as the extra {point.name}, which is {expected}: "
                "uninstall that package"
            )
        points[point.name] = point
    return points


@cache
def extra_named(name: str) -> Extra | None:
    """The extra of a name; None if it is not installed.

    Raises:
        ConfigError: its module is there, and cannot be imported.
    """
    point = _points().get(name)
    if point is None:
        return None
    try:
        extra = point.load()
    except (ImportError, AttributeError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{point.module}.".startswith(f"{missing}."):
            return None
        raise ConfigError(
            f"the extra {name} cannot be loaded from {point.value}: {error}"
        ) from error
    assert isinstance(extra, Extra)
    return extra


def extras() -> dict[str, Extra]:
    """The installed extras by name, in alphabetical order."""
    named = {name: extra_named(name) for name in sorted(_points())}
    return {name: extra for name, extra in named.items() if extra is not None}


def service(wanted: Service) -> Callable[..., Any] | None:
    """The function that serves; None if its extra is not installed."""
    extra = extra_named(wanted.extra)
    if extra is None:
        return None
    function: Callable[..., Any] = pkgutil.resolve_name(extra.services[wanted])
    return function


def required(wanted: Service, asked: str) -> Callable[..., Any]:
    """The function that serves what the user asked for in the words `asked`.

    Raises:
        ConfigError: its extra is not installed.
    """
    require_extra(wanted.extra, asked)
    function = service(wanted)
    assert function is not None
    return function


def require_extra(name: str, asked: str) -> None:
    """Refuse what the user asked for, in the words `asked`, if its extra is not installed.

    Raises:
        ConfigError: it is not.
    """
    if extra_named(name) is None:
        raise ConfigError(f"{asked} needs the extra {name}, which is not installed; {INSTALL}")
