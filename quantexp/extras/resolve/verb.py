"""`quantexp branch RUN... quant=SCHEME,...`: schemes on short branches from the checkpoints of runs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantexp.analysis.compare.arguments import named_runs
from quantexp.cli.output import complain, print_json, print_line
from quantexp.errors import ConfigError
from quantexp.extras.resolve.arms import arms_of, controls_of
from quantexp.extras.resolve.design import Design, bases_of, checkpoints_of, design_of
from quantexp.extras.resolve.driving import Driver, branches_work
from quantexp.extras.resolve.looks import looks_of
from quantexp.extras.resolve.outcome import outcome_of
from quantexp.extras.resolve.request import Request, numbers, request_of, require_margin
from quantexp.extras.resolve.results import Line, read_results
from quantexp.terminal.console import error_console, output_console


@dataclass(frozen=True)
class _Question:
    """The flags."""

    steps: tuple[int, ...]
    warm_up: int
    checkpoints: tuple[int, ...] | None
    tokens: int
    controls: tuple[str, ...]


def run(arguments: argparse.Namespace) -> int:
    """Run the branches that are missing, and show what they say; returns 1 if a branch's proof failed.

    Raises:
        QuantexpError: no such design, or its branches cannot run.
    """
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {arguments.tokens}")
    if arguments.warm_up < 0:
        raise ConfigError(f"--warm-up must be at least 0, got {arguments.warm_up}")
    require_margin(arguments.margin)
    request = request_of("branch", arguments.words)
    asked = None if arguments.start is None else numbers("from", arguments.start)
    steps, controls = numbers("steps", arguments.steps), controls_of(arguments.control)
    question = _Question(steps, arguments.warm_up, asked, arguments.tokens, controls)
    with tempfile.TemporaryDirectory() as temporary:
        formats = Path(temporary) if request.is_dry else request.folder
        return _run(request, question, formats, arguments)


def _run(
    request: Request, question: _Question, formats: Path, arguments: argparse.Namespace
) -> int:
    """The design with its noise formats in a folder, planned or run."""
    results = read_results(request.folder)
    seeds = len({line["seed"] for line in results.values()})
    looks = looks_of(request.folder, arguments.looks, seeds, is_dry=request.is_dry)
    design = _design(request, question, formats, results, arguments.config_dir)
    missing = [branch for branch in design.branches if not design.has(branch, results)]
    if request.is_dry:
        from quantexp.extras.resolve.plan import plan_of, print_plan

        plan = plan_of(design, missing, results, arguments.margin)
        if arguments.json:
            print_json(plan)
        else:
            print_plan(plan, output_console())
        return 0
    failures = Driver(branches_work(design, missing), error_console()).run() if missing else []
    for words in failures:
        complain(f"the proof failed in {words}")
    _show(design, read_results(request.folder), looks, arguments)
    return 1 if failures else 0


def _design(
    request: Request,
    question: _Question,
    formats: Path,
    results: Mapping[str, Line],
    config_dir: Path | None,
) -> Design:
    steps = question.steps
    bases = bases_of(named_runs(request.runs, request.root).runs)
    checkpoints = checkpoints_of(bases, question.checkpoints, question.warm_up + steps[-1])
    arms = arms_of(
        *(bases[0], checkpoints[0], request.schemes, request.against, question.controls),
        *(config_dir, formats),
    )
    return design_of(
        *(request.folder, bases, checkpoints, arms, steps, question.warm_up, question.tokens),
        *(request.overrides, results),
    )


def _show(
    design: Design,
    results: Mapping[str, Line],
    looks: Sequence[int],
    arguments: argparse.Namespace,
) -> None:
    """Print the verdicts and draw them."""
    from quantexp.extras.resolve.figure import draw_outcome
    from quantexp.extras.resolve.table import print_outcome, record

    outcome = outcome_of(design, results, arguments.margin, looks)
    if arguments.json:
        print_json(record(outcome))
        return
    print_outcome(outcome, output_console())
    files = draw_outcome(outcome, design.folder)
    if files:
        print_line(f"figure  {' '.join(map(str, files))}")
