"""From a multirun's words to its points: expanded, composed and validated, all of them before any one runs.

    words (a=x,y  b=glob(*)  c=range(1,4)), hydra.sweeper.params and sweep.* of the configuration
      -> explicit points x axes of the words, some zipped x seeds          (`variants`)
      -> each composed -> excluded ones dropped -> validated -> equal ones merged -> first ones first

Forms of several values and their product are Hydra's: its BasicSweeper splits them. The order is that of nested loops,
the last word fastest. `sweep.*` is one for the whole sweep, and no resolved point contains it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig

from quantexp.config.compose import clean_errors, composed, configuration, finished
from quantexp.config.overrides import numbers_as_typed, readable
from quantexp.config.sweep.match import Selection
from quantexp.config.sweep.variants import Expansion, expand, said_of_sweep
from quantexp.errors import ConfigError
from quantexp.schema import Experiment


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    #: What composes it: `compose(overrides, config_dir, {})` gives the same experiment.
    overrides: list[str]
    experiment: Experiment
    #: 0 for what `sweep.first` asks for, 1 for what waits until all of stage 0 is over; without `sweep.first` all is 0.
    stage: int = 0
    #: The overrides of further points that resolve to the same experiment.
    merged: list[list[str]] = field(default_factory=list)


def compose_points(
    words: list[str],
    config_dir: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Point]:
    """Every point of a multirun, validated, those of stage 0 before those of stage 1.

    Raises:
        ConfigError: a point that is not an experiment, a key of `sweep` that cannot be or means no point, or no
            points at all.
    """
    words = readable(words)
    with numbers_as_typed(words), configuration(config_dir) as extra:
        expansion = expand(words, extra, environment)
        exclude = Selection("sweep.exclude", expansion.request.exclude)
        first = Selection("sweep.first", expansion.request.first)
        points: dict[str, Point] = {}
        for index, variant in enumerate(expansion.variants):
            with _naming(expansion, index), clean_errors(config_dir):
                config = composed([*extra, *variant])
                _refuse_another_sweep(config, expansion)
                if not exclude.takes(config):
                    stage = 0 if not first.patterns or first.takes(config) else 1
                    _add(points, Point([*variant, *expansion.resets], finished(config), stage))
    exclude.check(len(expansion.variants))
    if not points:
        raise ConfigError(f"sweep.exclude leaves no point (of {len(expansion.variants)})")
    first.check(len(points))
    return sorted(points.values(), key=lambda point: point.stage)


def merged_lines(points: list[Point]) -> list[str]:
    """What to say about points that are the same experiment: a line for each that does not run by itself."""
    return [_merged_line(point.overrides, other) for point in points for other in point.merged]


def _merged_line(kept: list[str], other: list[str]) -> str:
    theirs = [word for word in other if word not in kept]
    ours = [word for word in kept if word not in other]
    if not theirs and not ours:
        return f"{' '.join(kept) or 'the point'} is there more than once: it runs once"
    same = f"{' '.join(theirs) or 'the point without it'} is the same experiment as "
    return f"{same}{' '.join(ours) or 'the point without it'}: it runs once"


def _add(points: dict[str, Point], point: Point) -> None:
    """Keep a point, or merge it into the one that resolves to the same experiment."""
    key = repr(point.experiment)
    same = points.get(key)
    if same is None:
        points[key] = point
    else:
        merged = [*same.merged, point.overrides]
        points[key] = replace(same, stage=min(same.stage, point.stage), merged=merged)


def _refuse_another_sweep(config: DictConfig, expansion: Expansion) -> None:
    """A swept choice with a sweep of its own would be half obeyed."""
    if said_of_sweep(config) != expansion.shared:
        raise ConfigError(
            "its files say something else about `sweep` than those of the whole sweep; what is swept cannot set "
            "`sweep` itself"
        )


@contextlib.contextmanager
def _naming(expansion: Expansion, index: int) -> Iterator[None]:
    """Say of which point an error is, and of which entry of the file of explicit points."""
    try:
        yield
    except ConfigError as error:
        words = " ".join(expansion.varied(index))
        entry = f"{expansion.request.points}, entry {index // expansion.num_each_entry + 1}: "
        where = entry if expansion.request.points else ""
        raise ConfigError(f"{where}{error}{f' (point {words})' if words else ''}") from error
