"""`quantexp prepare`: raw text to a pair that runs can read."""

from rich.console import Console

from quantexp.data.prepare.job import Prepared, make_job, prepare
from quantexp.data.prepare.report import print_report
from quantexp.data.prepare.report import report_json as report_json
from quantexp.errors import ConfigError
from quantexp.schema import Experiment


def run_prepare(experiment: Experiment, console: Console) -> Prepared:
    """Prepares the dataset of an experiment; nothing else of the experiment matters.

    Raises:
        ConfigError: no source.
        DataError: see `prepare`.
    """
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
        console.print("what is done is kept: the same command goes on from there")
        raise


def print_prepared(prepared: Prepared, console: Console) -> None:
    """Prints the report, and how to train on it."""
    if prepared.found:
        console.print("prepared before, from the same input in the same way:", markup=False)
    print_report(prepared.prefix, prepared.card, console)
    words = f"train quantexp dataset={prepared.card.dataset} dataset.path={prepared.prefix} ..."
    console.print(words, soft_wrap=True, markup=False)
