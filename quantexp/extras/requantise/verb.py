"""`quantexp requantise DIR`: scores a capture under every format, and recommends a scheme."""

from __future__ import annotations

import argparse
from pathlib import Path

from quantexp.cli.arguments import name_folder
from quantexp.cli.jobs import cluster_of, submit
from quantexp.cli.output import complain, print_json
from quantexp.config.formats import definitions
from quantexp.extras.requantise.arguments import Request, request_of, words_of
from quantexp.launch.backend import DividedWork
from quantexp.launch.divided_work import one_job
from quantexp.terminal.console import error_console, output_console


def run(arguments: argparse.Namespace) -> int:
    """Score, recommend, write and print, or submit a job that does; returns 0, or 1 if a file was unusable.

    Raises:
        CaptureError: nothing to score, or a folder that cannot be written.
        ConfigError: an unknown format, a number out of range, or an invalid launcher.
        RunError: the job cannot be submitted.
    """
    experiment = cluster_of(arguments, uses_config_dir=arguments.formats is not None)
    name_folder(arguments)
    request = request_of(arguments, definitions(arguments.formats, arguments.config_dir))
    if experiment is not None:
        return submit(_work_of(request, arguments.config_dir), experiment, as_json=arguments.json)
    from quantexp.extras.requantise.requantising import requantise

    outcome = requantise(request, error_console(), complain)
    if arguments.json:
        print_json(outcome.content)
    else:
        outcome.print(output_console())
    return outcome.exit_code(complain)


def _work_of(request: Request, config_dir: Path | None) -> DividedWork:
    """The request as the work of one job.

    Raises:
        QuantexpError: as `requantise`, before anything is scored.
    """
    from quantexp.extras.requantise.requantising import output_of

    words = ["requantise", *words_of(request)]
    if request.definitions and config_dir is not None:
        words += ["--config-dir", str(config_dir)]
    return one_job(
        words,
        output_of(request),
        activity="requantises",
        elsewhere="--out",
        again="it starts from the beginning",
    )
