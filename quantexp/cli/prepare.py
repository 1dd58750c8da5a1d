"""`quantexp prepare dataset=NAME dataset.source=FILES`: converts raw text to the pair of files that runs read."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from quantexp.cli.arguments import require_overrides
from quantexp.cli.output import print_json
from quantexp.config.compose import compose
from quantexp.data.prepare.job import make_job
from quantexp.data.prepare.report import print_report, report_json
from quantexp.data.prepare.run import Prepared, prepare
from quantexp.errors import ConfigError
from quantexp.schema import Experiment
from quantexp.terminal.console import error_console, output_console


def run(arguments: argparse.Namespace) -> int:
    """Prepare the dataset of the composed configuration and print its content; returns 0.

    Raises:
        ConfigError: no source.
        DataError: see `prepare`.
    """
    require_overrides(arguments.words)
    prepared = prepare_dataset(compose(arguments.words, arguments.config_dir), error_console())
    if arguments.json:
        print_json(record(prepared))
    else:
        show(prepared, output_console())
    return 0


def prepare_dataset(experiment: Experiment, console: Console) -> Prepared:
    """Prepare the dataset of an experiment; nothing else of the experiment matters."""
    dataset = experiment.dataset
    if dataset.source is None:
        raise ConfigError(
            f"dataset={dataset.name} has no raw text: give dataset.source=, a file, a folder, a pattern "
            "or hf:NAME of a Hugging Face dataset"
        )
    if dataset.blend:
        raise ConfigError("dataset.blend is for training; prepare each dataset by itself")
    job = make_job(dataset)
    try:
        return prepare(job, console, force=experiment.force)
    except KeyboardInterrupt:
        console.print("progress is saved: the same command resumes there")
        raise


def record(prepared: Prepared) -> dict[str, Any]:
    """The output of `prepare --json`."""
    return report_json(prepared.prefix, prepared.card)


def show(prepared: Prepared, console: Console) -> None:
    """Print the report, and how to train on the data."""
    if prepared.existed:
        console.print("prepared before, from the same input in the same way:", markup=False)
    print_report(prepared.prefix, prepared.card, console)
    words = f"train quantexp dataset={prepared.card.dataset} dataset.path={prepared.prefix} ..."
    console.print(words, soft_wrap=True, markup=False)
