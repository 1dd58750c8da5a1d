"""`quantexp prepare dataset=NAME dataset.source=FILES`: converts raw text to the pair of files that runs read."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from quantexp.cli import jobs
from quantexp.cli.arguments import require_overrides
from quantexp.cli.output import print_json
from quantexp.config.compose import compose
from quantexp.data.prepare.job import Job, make_job
from quantexp.data.prepare.partial import partial_folder
from quantexp.data.prepare.run import Prepared, existing_result, prepare
from quantexp.errors import ConfigError
from quantexp.extras.prepare.divided import content_of, groups_of
from quantexp.extras.prepare.report import print_rejected, print_report, report_json
from quantexp.folders import override_word
from quantexp.launch.backend import DividedJobs, DividedWork, launcher_of
from quantexp.launch.divided_work import refuse_while_jobs_work
from quantexp.schema import Experiment
from quantexp.terminal.console import error_console, output_console


def run(arguments: argparse.Namespace) -> int:
    """Prepare the dataset of the composed configuration, here or as jobs of a cluster, and print the result; returns 0.

    Raises:
        ConfigError: no source, or a launcher that cannot prepare.
        DataError: see `prepare`.
        RunError: jobs prepare there already, or cannot be submitted.
    """
    require_overrides(arguments.words)
    experiment = compose(arguments.words, arguments.config_dir)
    job = job_of(experiment)
    result = prepare_dataset(experiment, job, error_console())
    if arguments.json:
        print_json(record(result, job))
        if isinstance(result, Prepared):
            print_rejected(result.prefix, result.card, error_console())
    elif isinstance(result, Prepared):
        show(result, output_console())
    else:
        jobs.show(result, output_console())
    return 0


def job_of(experiment: Experiment) -> Job:
    """The preparation of an experiment's dataset; nothing else of the experiment matters but launcher and `force`."""
    dataset = experiment.dataset
    if experiment.dry_run:
        raise ConfigError("dry_run is for runs; drop it, or leave the preparation out")
    if dataset.source is None:
        raise ConfigError(
            f"dataset={dataset.name} has no raw text: give dataset.source=, a file, a folder, a pattern "
            "or hf:NAME of a Hugging Face dataset"
        )
    if dataset.blend:
        raise ConfigError("dataset.blend is for training; prepare each dataset by itself")
    return make_job(dataset)


def prepare_dataset(experiment: Experiment, job: Job, console: Console) -> Prepared | DividedJobs:
    """Prepare here, or submit jobs that do unless the dataset exists."""
    if not experiment.launcher.is_local:
        existing = existing_result(job, force=experiment.force)
        if existing is not None:
            return existing
        work = work_of(experiment, job)
        return launcher_of(experiment.launcher.kind).divide(work, experiment, console)
    refuse_while_jobs_work(partial_folder(job))
    try:
        return prepare(job, console, force=experiment.force)
    except KeyboardInterrupt:
        console.print("progress is saved: the same command resumes there")
        raise


def work_of(experiment: Experiment, job: Job) -> DividedWork:
    """The preparation as work for jobs."""
    return DividedWork(
        verb="prepare",
        result=job.prefix,
        folder=partial_folder(job),
        command=["-m", "quantexp.extras.prepare.divided"],
        again=jobs.RESUMES,
        content=content_of(job, experiment.dataset, force=experiment.force),
        groups=groups_of(job),
        parts="input files",
        num_parts=len(job.inputs),
    )


def record(result: Prepared | DividedJobs, job: Job) -> dict[str, Any]:
    """The output of `prepare --json`."""
    if isinstance(result, Prepared):
        return report_json(result.prefix, result.card)
    about = {"prefix": str(job.prefix), "dataset": job.filters.name}
    return about | jobs.record(result)


def show(prepared: Prepared, console: Console) -> None:
    """Print the report, how to train on the data, and last what was rejected."""
    if prepared.existed:
        console.print("prepared before, from the same input in the same way:", markup=False)
    print_report(prepared.prefix, prepared.card, console)
    path = override_word("dataset.path", prepared.prefix)
    words = f"train quantexp dataset={prepared.card.dataset} {path} ..."
    console.print(words, soft_wrap=True, markup=False)
    print_rejected(prepared.prefix, prepared.card, console)
