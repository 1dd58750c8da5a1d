"""`quantexp draw DIR ...`: figures and statistics of captured tensors."""

from __future__ import annotations

import argparse
from dataclasses import replace

from quantexp.analysis.draw.arguments import Request, request_of, words_of
from quantexp.analysis.pool import start_server
from quantexp.analysis.tree import STATISTICS
from quantexp.cli.arguments import root_and_rest
from quantexp.cli.jobs import RESUMES, cluster_of, submit
from quantexp.cli.output import complain, print_line
from quantexp.launch.backend import DividedWork
from quantexp.launch.divided_work import one_job
from quantexp.runs.find import existing_or_named
from quantexp.terminal.console import error_console


def run(arguments: argparse.Namespace) -> int:
    """Draw and print the output folder, or submit a job that draws; returns 0, or 1 if a file was unusable.

    Raises:
        CaptureError: nothing to draw, or a folder that cannot be written.
        ConfigError: an unknown filter, part or format, or an invalid launcher.
        RunError: a run's configuration or a sweep's list that cannot be read, or a job that cannot be submitted.
    """
    experiment = cluster_of(arguments)
    root, arguments.words = root_and_rest(arguments.words)
    wanted = request_of(arguments)
    wanted = replace(wanted, folders=[existing_or_named(each, root) for each in wanted.folders])
    if experiment is not None:
        return submit(_work_of(wanted), experiment)
    if wanted.jobs != 1:
        start_server(draws=wanted.only != (STATISTICS,))  # it imports while this process does
    from quantexp.analysis.draw.verb import draw

    outcome = draw(wanted, error_console(), complain)
    print_line(outcome.words)
    return outcome.exit_code(complain)


def _work_of(request: Request) -> DividedWork:
    """The request as the work of one job.

    Raises:
        QuantexpError: as `draw`, before anything is drawn.
    """
    from quantexp.analysis.draw.verb import output_of

    out = output_of(request)
    words = ["draw", *words_of(replace(request, out=out))]
    return one_job(words, out.absolute(), activity="draws", elsewhere="out=", again=RESUMES)
