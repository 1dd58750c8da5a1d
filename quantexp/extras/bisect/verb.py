"""`quantexp bisect RUN`: which quantised slots a trouble of a run comes from."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from quantexp.analysis.compare.arguments import out_and_rest
from quantexp.cli.arguments import parser_of, root_and_rest
from quantexp.cli.output import print_json, print_line, require_folder
from quantexp.errors import ConfigError, RunError
from quantexp.extras.bisect.replays import folder_of, gradient_of, origin_of
from quantexp.extras.bisect.result import NAME
from quantexp.extras.bisect.search import Verdict
from quantexp.folders import for_shell, shell_word
from quantexp.launch.replays import Origin, other_loop
from quantexp.quant.units import aspects_of
from quantexp.runs.find import find_run
from quantexp.runs.gradients import Gradients
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import read_config
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
    if out is not None:
        require_folder(out)
    overrides = [word for word in words if word.startswith(_CHANGEABLE)]
    named = [word for word in words if word not in overrides]
    if len(named) != 1:
        parser_of("bisect").error(f"bisect takes one RUN, got {' '.join(named) or 'nothing'}")
    run_dir = find_run(named[0], root)
    aspects = aspects_of(arguments.by.split(","), "--by")
    _refuse_unused(arguments)
    if arguments.gradient and (loop := other_loop(run_dir)) is not None:
        return _gradient_of_loop(run_dir, loop, arguments, overrides, out)
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
    from quantexp.extras.bisect.culprit import curves_of, find
    from quantexp.extras.bisect.figure import draw_result
    from quantexp.extras.bisect.measures import trouble_of
    from quantexp.extras.bisect.result import print_result, record
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
    folder = out or folder_of(origin)
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
        if result.file is not None and result.override is not None:
            print_line(f"scheme  {result.file}")
            print_line(f"        quantexp --config-dir {for_shell(folder)} quant={NAME} ...")
            print_line(f"or      {shell_word(result.override)}")
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
    from quantexp.extras.bisect.rounds import run_all
    from quantexp.runs.gradients import read_gradients

    experiment = gradient_of(origin, [aspect.value for aspect in aspects])
    (run_dir,) = run_all([experiment], error_console())
    gradients = read_gradients(run_dir)
    assert gradients is not None
    scheme = str(origin.experiment.quant.name)
    return _shown(run_dir, scheme, gradients, out or folder_of(origin), as_json=as_json)


def _gradient_of_loop(
    run: RunDir,
    loop: str,
    arguments: argparse.Namespace,
    overrides: Sequence[str],
    out: Path | None,
) -> int:
    """Show the gradients that another training loop compared, which alone can repeat its data.

    Raises:
        RunError: it compared none.
        ConfigError: the words ask for another comparison.
    """
    from quantexp.runs.gradients import read_gradients

    gradients = read_gradients(run)
    if gradients is None:
        raise RunError(
            f"{run.root.name} was trained by {loop}, which alone can repeat its data: start its script once more with "
            f"QUANTEXP_GRADIENT={arguments.by}, which compares the gradients of the first iteration after its "
            "checkpoint and ends; then: quantexp bisect FOLDER --gradient"
        )
    if arguments.start is not None or overrides:
        word = overrides[0] if overrides else f"--from {arguments.start}"
        raise ConfigError(f"{word} has no effect: {loop} has compared these gradients")
    scheme = str(read_config(run)["quant"]["name"])
    return _shown(run, scheme, gradients, out or run.root, as_json=arguments.json)


def _shown(run: RunDir, scheme: str, gradients: Gradients, out: Path, *, as_json: bool) -> int:
    """Print the comparison, and draw it into a folder."""
    from quantexp.extras.bisect.gradient_figure import draw_gradients
    from quantexp.extras.bisect.gradient_table import print_gradients

    if as_json:
        print_json({"run": str(run.root), **gradients})
        return 0
    print_gradients(scheme, gradients, output_console())
    files = draw_gradients(scheme, gradients, out)
    print_line(f"figure  {' '.join(map(str, files))}")
    return 0
