"""`quantexp evaluate [-m] group=choice key=value ...`: given weights on held-out text, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantexp.cli.arguments import require_overrides, root_and_rest
from quantexp.cli.output import complain, print_json, print_line, require_folder
from quantexp.cli.train import points_of, submit
from quantexp.config.tasks import check_task_names, tasks_of
from quantexp.errors import ConfigError, RunError
from quantexp.folders import writing_into
from quantexp.schema import Experiment
from quantexp.terminal.console import error_console, output_console

#: The keys of training that a forward pass has; the others do nothing here.
_USED = (
    *("seq_length", "micro_batch_size", "precision", "attention", "weight_cache", "start_from"),
    *("seed", "chaos", "deterministic", "name"),
)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the results and draw them; the exit code is that of a run or sweep.

    Raises:
        ConfigError: an experiment that cannot be, or a key that does nothing without training.
        RunError: an evaluation that does not fit into the memory there is, or a folder that cannot be written.
    """
    from quantexp.analysis.compare.arguments import out_and_rest

    out, words = out_and_rest(arguments.words)
    folder = out or Path("evaluate")
    if not arguments.json:
        require_folder(folder)
    words = _with_run(words)
    require_overrides(words)
    _refuse_unused(words)
    is_chosen = any(word.startswith("capture=") for word in words)
    words = [*tasks_of(words), "evaluate.only=true", *([] if is_chosen else ["capture=off"])]
    arguments = argparse.Namespace(**{**vars(arguments), "words": words})
    points = points_of(arguments)
    experiments = [point.experiment for point in points]
    for experiment in experiments:
        if experiment.evaluate.tasks:
            check_task_names(experiment.evaluate)
    is_dry = experiments[0].dry_run
    console = error_console() if arguments.json and not is_dry else output_console()
    code = submit(points, arguments, console)
    if is_dry:
        return code
    results = record(experiments)
    if arguments.json:
        print_json(results)
        return code
    _show_rest(experiments, results, folder)
    return code


def _with_run(words: list[str]) -> list[str]:
    """The words with the overrides that `RUN@ITERATION` stands for in its place."""
    runs = [word for word in words if "=" not in word and not word.startswith("~")]
    if len(runs) != 1:
        return words
    from quantexp.config.from_run import from_run

    rest = [word for word in words if word not in runs]
    return [*from_run(runs[0], rest, root_and_rest(rest)[0]), *rest]


def _refuse_unused(words: Sequence[str]) -> None:
    """Refuse words about the training; those of a preset are ignored.

    Raises:
        ConfigError: names the first.
    """
    for word in words:
        section, dot, key = word.lstrip("+").partition("=")[0].partition(".")
        if section == "training" and dot and key not in _USED:
            raise ConfigError(
                f"{word} has no effect on quantexp evaluate, which trains nothing: drop it"
            )


def record(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """The output of `evaluate --json`: for each experiment its scheme, folder, and results, None without them."""
    from quantexp.launch.attempt import run_folder
    from quantexp.launch.label import differences
    from quantexp.runs.device import device_class
    from quantexp.runs.evaluation import read_evaluation

    records = []
    for experiment, differs in zip(experiments, differences(experiments), strict=True):
        run = run_folder(experiment, device_class(experiment.launcher))
        records.append(
            {
                "scheme": str(experiment.quant.name),
                "differs": " ".join(differs),
                "run": str(run.root),
                "evaluation": read_evaluation(run),
            }
        )
    return records


def _show_rest(
    experiments: Sequence[Experiment], records: Sequence[dict[str, Any]], folder: Path
) -> None:
    """Draw what has results; the launcher has printed them."""
    from quantexp.analysis.evaluation_table import Result
    from quantexp.extras.evaluate.figure import draw_results

    missing = sum(one["evaluation"] is None for one in records)
    if missing and not experiments[0].launcher.is_local:
        complain(
            f"{missing} of {len(records)} evaluations have no results yet; the same command shows them when their jobs "
            "have ended"
        )
    results = [Result(one["scheme"], one["differs"], "", one["evaluation"]) for one in records]
    with writing_into(folder, RunError, "out=FOLDER"):
        files = draw_results(results, folder)
    if files:
        print_line(f"figure  {' '.join(map(str, files))}")
