"""`quantexp [train] [-m] group=choice key=value ...`: run an experiment or a sweep, here or under SLURM."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quantexp.cli.arguments import require_overrides
from quantexp.config.compose import compose, quick_test
from quantexp.config.sweep.points import Point, compose_points, merged_lines
from quantexp.errors import ConfigError
from quantexp.launch.backend import launcher_of
from quantexp.launch.refusal import Request, require_startable
from quantexp.terminal.console import output_console


def run(arguments: argparse.Namespace) -> int:
    """Train the composed experiment or sweep; returns 0 if completed or submitted, 1 if failed, 130 if interrupted.

    Raises:
        ConfigError: an experiment that cannot be, or a sweep over several launchers.
        RunError: a run that does not fit into the memory there is.
    """
    require_overrides(arguments.words)
    return submit(points_of(arguments), arguments, output_console())


def points_of(arguments: argparse.Namespace) -> list[Point]:
    """The points of a sweep, or the one experiment.

    Raises:
        ConfigError: an experiment that cannot be.
    """
    words, config_dir = arguments.words, arguments.config_dir
    if arguments.multirun:
        return compose_points(words, config_dir)
    return [Point(words, compose(words, config_dir))]


def submit(points: Sequence[Point], arguments: argparse.Namespace, console: Console) -> int:
    """Show the plan of a dry run, or run the points; the exit codes are those of `run`.

    Raises:
        ConfigError: a sweep over several launchers.
        RunError: a run that does not fit into the memory there is.
    """
    return (_submit_sweep if arguments.multirun else _submit_one)(
        points, arguments.config_dir, console
    )


def _submit_one(points: Sequence[Point], config_dir: Path | None, console: Console) -> int:
    (point,) = points
    experiment = point.experiment
    if experiment.dry_run:
        from quantexp.cli.plan import show_one

        return show_one(point, config_dir, None, console)
    require_startable([Request(experiment, quick_test(point.overrides, config_dir, os.environ))])
    launcher = launcher_of(experiment.launcher.kind)
    return launcher.submit([(experiment, 0)], console, is_sweep=False)


def _submit_sweep(points: Sequence[Point], config_dir: Path | None, console: Console) -> int:
    for line in merged_lines(points):
        console.print(line, soft_wrap=True, markup=False)
    if points[0].experiment.dry_run:
        from quantexp.cli.plan import show_points

        return show_points(points, config_dir, None, console)
    kinds = sorted({point.experiment.launcher.kind for point in points})
    if len(kinds) > 1:
        raise ConfigError(
            f"launcher must be one for all points of a sweep, got {', '.join(kinds)}; run one sweep for each"
        )
    require_startable(
        [Request(p.experiment, quick_test(p.overrides, config_dir, {})) for p in points]
    )
    staged = [(point.experiment, point.stage) for point in points]
    return launcher_of(kinds[0]).submit(staged, console, is_sweep=True)
