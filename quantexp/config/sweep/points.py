"""The points of a multirun: expanded, composed and validated, all of them before the first one runs.

    words (a=x,y  b=glob(*)  c=range(1,4)), hydra.sweeper.params and sweep.* of the configuration
      -> explicit points x axes of the words, some zipped x seeds          (`variants`)
      -> compose each -> drop the excluded -> validate -> merge equal points -> sort by stage

Hydra's BasicSweeper splits several values and forms their product. The order is that of nested loops, with the last
override fastest. `sweep.*` holds for the whole sweep, and no resolved point contains it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig

from quantexp.config.compose import composed, configuration, finished
from quantexp.config.composition_errors import clean_errors
from quantexp.config.overrides import numbers_as_typed, readable
from quantexp.config.sweep.match import Selection
from quantexp.config.sweep.variants import Expansion, expand, sweep_section
from quantexp.errors import ConfigError
from quantexp.schema import Experiment


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    #: The point's overrides: `compose(overrides, config_dir, {})` gives the same experiment.
    overrides: list[str]
    experiment: Experiment
    #: 0 for points that match `sweep.first`, 1 for points that wait for all of stage 0; without `sweep.first` always 0.
    stage: int = 0
    #: The overrides of other points that resolve to the same experiment.
    merged: list[list[str]] = field(default_factory=list)


def compose_points(
    words: list[str],
    config_dir: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Point]:
    """Every point of a multirun, validated; stage 0 before stage 1.

    Raises:
        ConfigError: a point is not an experiment, a key of `sweep` is invalid or matches no point, or no point is left.
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


def merged_lines(points: Sequence[Point]) -> list[str]:
    """A message for each point that equals an earlier one and does not run by itself."""
    return [_merged_line(point.overrides, other) for point in points for other in point.merged]


def _merged_line(*overrides: list[str]) -> str:
    kept, other = ([w for w in words if not w.startswith("sweep.")] for words in overrides)
    only_other = [word for word in other if word not in kept]
    only_kept = [word for word in kept if word not in other]
    if not only_other and not only_kept:
        return f"{' '.join(kept) or 'the point'} is there more than once: it runs once"
    same = f"{' '.join(only_other) or 'the point without it'} is the same experiment as "
    return f"{same}{' '.join(only_kept) or 'the point without it'}: it runs once"


def _add(points: dict[str, Point], point: Point) -> None:
    """Add a point, or merge it into an equal one."""
    key = repr(point.experiment)
    same = points.get(key)
    if same is None:
        points[key] = point
    else:
        merged = [*same.merged, point.overrides]
        points[key] = replace(same, stage=min(same.stage, point.stage), merged=merged)


def _refuse_another_sweep(config: DictConfig, expansion: Expansion) -> None:
    """Refuse a swept choice that defines a sweep itself, which would be obeyed only in part."""
    if sweep_section(config) != expansion.shared:
        raise ConfigError(
            "its files say something else about `sweep` than those of the whole sweep; what is swept cannot set "
            "`sweep` itself"
        )


@contextlib.contextmanager
def _naming(expansion: Expansion, index: int) -> Iterator[None]:
    """Add to an error its point, and its entry in the file of explicit points."""
    try:
        yield
    except ConfigError as error:
        words = " ".join(expansion.varied(index))
        number = index // expansion.points_per_entry + 1  # beyond the file's for a baseline
        where = f"{expansion.request.points}, entry {number}: " if expansion.request.points else ""
        raise ConfigError(f"{where}{error}{f' (point {words})' if words else ''}") from error
