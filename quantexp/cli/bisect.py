"""`quantexp bisect RUN`: which quantised slots a trouble of a run comes from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from quantexp.analysis.compare.arguments import out_and_rest
from quantexp.cli.arguments import parser_of, root_and_rest
from quantexp.cli.output import print_json, print_line
from quantexp.errors import ConfigError
from quantexp.launch.replays import Origin, gradient_of, origin_of
from quantexp.quant.units import aspects_of
from quantexp.runs.find import find_run
from quantexp.schema import Aspect
from quantexp.terminal.console import error_console, output_console

#: What may be changed of the replays: how these words begin.
_CHANGEABLE = ("launcher.", "memory=")


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
    raise NotImplementedError


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse flags of the search beside `--gradient`.

    Raises:
        ConfigError: names the first.
    """
    if not arguments.gradient:
        return
    for flag in ("steps", "measure", "margin", "threshold"):
        if getattr(arguments, flag) is not None:
            raise ConfigError(f"--{flag} has no effect beside --gradient: drop one of them")


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
