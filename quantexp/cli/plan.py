"""`quantexp plan [-m] [device=GPU] group=choice key=value ...`: what would run; needs neither data nor a GPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantexp.cli.arguments import require_overrides
from quantexp.cli.output import complain, print_json
from quantexp.cli.plan_backend import device_of
from quantexp.cli.plan_record import Plan, make_plan
from quantexp.cli.plan_sweep import show_sweep
from quantexp.cli.plan_text import show
from quantexp.config.compose import compose, quick_test
from quantexp.config.sweep.points import Point, compose_points, merged_lines
from quantexp.quant.transformer_engine.hardware import Gpu
from quantexp.terminal.console import output_console


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of an experiment or of a sweep; returns 0.

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
        plans = plans_of(points, config_dir, gpu)
        if arguments.json:
            print_json([record(plan) for plan in plans])
        else:
            experiments = [point.experiment for point in points]
            show_sweep(experiments, plans, output_console(), maps=arguments.maps)
        return 0
    plan = make_plan(compose(words, config_dir), quick_test(words, config_dir, os.environ), gpu)
    if arguments.json:
        print_json(record(plan))
    else:
        show(plan, output_console())
    return 0


def plans_of(
    points: Sequence[Point], config_dir: Path | None, gpu: Gpu | None = None
) -> list[Plan]:
    """The plan of each point of a sweep; `gpu` is that of `make_plan`."""
    return [
        make_plan(point.experiment, quick_test(point.overrides, config_dir, {}), gpu)
        for point in points
    ]


def record(plan: Plan) -> dict[str, Any]:
    """The output of `plan --json`."""
    return asdict(plan)
