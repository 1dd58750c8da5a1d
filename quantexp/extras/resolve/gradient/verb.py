"""`quantexp gradient RUN... quant=SCHEME,...`: the errors of schemes' gradients at the checkpoints of runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from quantexp.analysis.compare.arguments import named_runs
from quantexp.cli.output import complain, print_json, print_line
from quantexp.errors import ConfigError
from quantexp.extras.resolve.arms import arms_of
from quantexp.extras.resolve.design import bases_of, checkpoints_of
from quantexp.extras.resolve.driving import Driver
from quantexp.extras.resolve.gradient.design import (
    GradientDesign,
    gradient_design,
    gradients_work,
)
from quantexp.extras.resolve.gradient.results import Line
from quantexp.extras.resolve.looks import looks_of
from quantexp.extras.resolve.request import numbers, request_of, require_margin
from quantexp.extras.resolve.results import last_lines
from quantexp.quant.units import aspects_of
from quantexp.terminal.console import error_console, output_console

#: A squared bias is the mean over pairs of batches.
_FEWEST_BATCHES = 2
_NONE = "none"


def run(arguments: argparse.Namespace) -> int:
    """Compute the gradients that are missing, and show what they say; returns 1 if a proof failed.

    Raises:
        QuantexpError: no such design, or its passes cannot run.
    """
    design = _design(arguments)
    results = last_lines(design.folder, Line)
    is_dry = request_of("gradient", arguments.words).is_dry
    seeds = len({line["seed"] for line in results.values()})
    looks = looks_of(design.folder, arguments.looks, seeds, is_dry=is_dry)
    missing = [branch for branch in design.branches if not design.has(branch, results)]
    if is_dry:
        from quantexp.extras.resolve.gradient.plan import plan_of, print_plan

        plan = plan_of(design, missing, results, arguments.margin)
        if arguments.json:
            print_json(plan)
        else:
            print_plan(plan, output_console())
        return 0
    failures = Driver(gradients_work(design, missing), error_console()).run() if missing else []
    for words in failures:
        complain(f"the proof failed in {words}")
    _show(design, last_lines(design.folder, Line), looks, arguments)
    return 1 if failures else 0


def _design(arguments: argparse.Namespace) -> GradientDesign:
    require_margin(arguments.margin)
    if arguments.batches < _FEWEST_BATCHES:
        raise ConfigError(
            f"--batches must be at least {_FEWEST_BATCHES}, whose errors tell bias from variance, got "
            f"{arguments.batches}"
        )
    if arguments.draws < 1:
        raise ConfigError(f"--draws must be at least 1, got {arguments.draws}")
    by = [] if arguments.by == _NONE else arguments.by.split(",")
    aspects = [aspect.value for aspect in aspects_of(by, "--by")]
    request = request_of("gradient", arguments.words)
    asked = None if arguments.start is None else numbers("from", arguments.start)
    bases = bases_of(named_runs(request.runs, request.root).runs)
    checkpoints = checkpoints_of(bases, asked, arguments.batches, "--batches")
    arms = arms_of(
        *(bases[0], checkpoints[0], request.schemes, request.against, ()),
        *(arguments.config_dir, request.folder),
    )
    return gradient_design(
        *(request.folder, bases, checkpoints, arms, arguments.batches, arguments.draws),
        *(aspects, request.overrides),
    )


def _show(
    design: GradientDesign,
    results: Mapping[str, Line],
    looks: Sequence[int],
    arguments: argparse.Namespace,
) -> None:
    """Print the numbers and verdicts, and draw them."""
    from quantexp.extras.resolve.gradient.figure import draw_outcome
    from quantexp.extras.resolve.gradient.outcome import outcome_of
    from quantexp.extras.resolve.gradient.table import print_outcome, record

    outcome = outcome_of(design, results, arguments.margin, looks)
    if arguments.json:
        print_json(record(outcome))
        return
    print_outcome(outcome, output_console())
    files = draw_outcome(outcome, design.folder)
    if files:
        print_line(f"figure  {' '.join(map(str, files))}")
