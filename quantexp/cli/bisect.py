"""`quantexp bisect RUN`: which quantised slots a trouble of a run comes from."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from quantexp.analysis.bisect.scheme_file import NAME
from quantexp.analysis.bisect.search import Verdict
from quantexp.analysis.compare.arguments import out_and_rest
from quantexp.cli.arguments import parser_of, root_and_rest
from quantexp.cli.output import print_json, print_line
from quantexp.errors import ConfigError
from quantexp.launch.replays import Origin, gradient_of, origin_of
from quantexp.quant.units import aspects_of
from quantexp.runs.find import find_run
from quantexp.runs.paths import RunDir
from quantexp.schema import Aspect
from quantexp.terminal.console import error_console, output_console

#: What may be changed of the replays: how these words begin.
_CHANGEABLE = ("launcher.", "memory=")
#: The default replays from moved weights, of the scheme and of bf16 each.
_CHANCE = 2


def run(arguments: argparse.Namespace) -> int:
    """Compare gradients, or search by replays; returns 0, or 1 if the trouble is not the quantisation's.

    Raises:
        QuantexpError: there is nothing to replay, or a replay cannot run.
    """
    root, words = root_and_rest(arguments.words)
    out, words = out_and_rest(words)
    overrides = [word for word in words if word.startswith(_CHANGEABLE)]
    named = [word for word in words if word not in overrides]
    if len(named) != 1:
        parser_of("bisect").error(f"bisect takes one RUN, got {' '.join(named) or 'nothing'}")
    run_dir = find_run(named[0], root)
    aspects = aspects_of(arguments.by.split(","), "--by")
    _refuse_unused(arguments)
    if arguments.gradient:
        origin = origin_of(run_dir, arguments.start, before=None, overrides=overrides)
        return _gradient(origin, aspects, out, as_json=arguments.json)
    return _search(arguments, run_dir, overrides, aspects, out)


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse flags of the search beside `--gradient`.

    Raises:
        ConfigError: names the first.
    """
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {arguments.steps}")
    if arguments.chance is not None and arguments.chance < 0:
        raise ConfigError(f"--chance must be at least 0, got {arguments.chance}")
    if not arguments.gradient:
        return
    for flag in ("steps", "measure", "margin", "deviations", "threshold", "chance"):
        if getattr(arguments, flag) is not None:
            raise ConfigError(f"--{flag} has no effect beside --gradient: drop one of them")


def _search(
    arguments: argparse.Namespace,
    run_dir: RunDir,
    overrides: Sequence[str],
    aspects: Sequence[Aspect],
    out: Path | None,
) -> int:
    from quantexp.analysis.bisect.figure import draw_result
    from quantexp.analysis.bisect.measures import trouble_of
    from quantexp.analysis.bisect.result import print_result, record
    from quantexp.cli.bisect_search import curves_of, find
    from quantexp.runs.status import write_json

    trouble = trouble_of(run_dir, arguments.measure, arguments.start, arguments.steps)
    bound = _bound(arguments, trouble.measure)
    for flag in ("steps", "chance") if trouble.measure == "gradient" else ():
        if getattr(arguments, flag) is not None:
            raise ConfigError(f"--{flag} has no effect on the gradient, which is of one iteration")
    origin = origin_of(run_dir, arguments.start, trouble.iteration, overrides)
    last = origin.start + (arguments.steps or max(1, trouble.iteration - origin.start))
    last = min(last, origin.experiment.training.iterations)
    if trouble.measure == "gradient":
        last = origin.first
    folder = out or origin.folder
    console = error_console()
    console.print(f"looking for  {trouble.words}", soft_wrap=True, markup=False)
    chance = _CHANCE if arguments.chance is None else arguments.chance
    result, replays = find(origin, last, aspects, trouble, bound, chance, folder, console)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bisect.json", record(result))
    files = draw_result(result, curves_of(replays, result), folder)
    if arguments.json:
        print_json(record(result))
    else:
        print_result(result, output_console())
        if result.file is not None:
            print_line(f"scheme  {result.file}")
            print_line(f"        quantexp --config-dir {folder} quant={NAME} ...")
            print_line(f"or      {result.override}")
        print_line(f"figure  {' '.join(map(str, files))}")
    return 0 if result.found.verdict is Verdict.FOUND else 1


def _bound(arguments: argparse.Namespace, measure: str) -> float | None:
    """The bound that the user gave; None for the derived one.

    Raises:
        ConfigError: it is not positive, or of another measure.
    """
    bounds = (("margin", "loss"), ("deviations", "grad_norm"), ("threshold", "gradient"))
    for flag, of in bounds:
        value = getattr(arguments, flag)
        if value is None:
            continue
        if measure != of:
            raise ConfigError(
                f"--{flag} is for --measure {of}, and the trouble is looked for by {measure}"
            )
        if not 0 < value < math.inf:
            raise ConfigError(f"--{flag} must be greater than 0, got {value}")
        return float(value)
    return None


def _gradient(origin: Origin, aspects: Sequence[Aspect], out: Path | None, *, as_json: bool) -> int:
    from quantexp.analysis.bisect.gradient_figure import draw_gradients
    from quantexp.analysis.bisect.gradient_table import print_gradients
    from quantexp.cli.bisect_replays import run_all
    from quantexp.runs.gradients import read_gradients

    experiment = gradient_of(origin, [aspect.value for aspect in aspects])
    (run_dir,) = run_all([experiment], error_console())
    gradients = read_gradients(run_dir)
    assert gradients is not None
    if as_json:
        print_json({"run": str(run_dir.root), **gradients})
        return 0
    scheme = str(origin.experiment.quant.name)
    print_gradients(scheme, gradients, output_console())
    files = draw_gradients(scheme, gradients, out or origin.folder)
    print_line(f"figure  {' '.join(map(str, files))}")
    return 0
