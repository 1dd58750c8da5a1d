"""`quantexp plan [-m] [device=GPU] group=choice key=value ...`: what would run; needs neither data nor a GPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from quantexp.cli.arguments import require_overrides
from quantexp.cli.output import complain, print_json
from quantexp.cli.plan_backend import device_of
from quantexp.cli.plan_record import Plan, make_plan, with_time
from quantexp.cli.plan_sweep import exit_code, show_sweep
from quantexp.cli.plan_text import show
from quantexp.config.compose import compose, quick_test
from quantexp.config.sweep.points import Point, compose_points, merged_lines
from quantexp.launch.refusal import too_large_together
from quantexp.terminal.console import output_console


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of an experiment or of a sweep; returns 0, or 1 if a run of it cannot start.

    Raises:
        ConfigError: an experiment that cannot be.
    """
    config_dir = arguments.config_dir
    words, gpu = device_of(arguments.words)
    require_overrides(words)
    if arguments.multirun:
        points = compose_points(words, config_dir)
        for line in merged_lines(points):
            complain(line)
        return show_points(
            points, config_dir, gpu, output_console(), as_json=arguments.json, maps=arguments.maps
        )
    return show_one(
        Point(words, compose(words, config_dir)),
        config_dir,
        gpu,
        output_console(),
        as_json=arguments.json,
    )


def show_one(
    point: Point,
    config_dir: Path | None,
    gpu: object | None,
    console: Console,
    *,
    as_json: bool = False,
) -> int:
    """Print the plan of an experiment; returns as `run`."""
    experiment = point.experiment
    fast = quick_test(point.overrides, config_dir, os.environ)
    plan = make_plan(experiment, fast, gpu)
    complete = partial(with_time, experiment=experiment)
    if as_json:
        print_json(record(complete(plan)))
    else:
        show(plan, console, complete)
    return exit_code([experiment], [plan], complain)


def show_points(
    points: Sequence[Point],
    config_dir: Path | None,
    gpu: object | None,
    console: Console,
    *,
    as_json: bool = False,
    maps: bool = False,
) -> int:
    """Print the plan of a sweep; returns as `run`."""
    plans = plans_of(points, config_dir, gpu)
    experiments = [point.experiment for point in points]
    if as_json:
        together = too_large_together(experiments)
        print_json([record(plan, *[together] if together else []) for plan in plans])
    else:
        show_sweep(experiments, plans, console, maps=maps)
    return exit_code(experiments, plans, complain)


def plans_of(
    points: Sequence[Point], config_dir: Path | None, gpu: object | None = None
) -> list[Plan]:
    """The plan of each point of a sweep; `gpu` is that of `make_plan`."""
    return [
        with_time(
            make_plan(point.experiment, quick_test(point.overrides, config_dir, {}), gpu),
            point.experiment,
        )
        for point in points
    ]


def record(plan: Plan, *of_sweep: str) -> dict[str, Any]:
    """The output of `plan --json`; `of_sweep` are reasons why no run of its sweep can start."""
    return asdict(plan) | {"blockers": [*plan.blockers, *of_sweep]}
