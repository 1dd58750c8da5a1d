"""Prints the summary of one run and the table of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from quantexp.analysis.evaluation_table import (
    Result,
    evaluated_words,
    print_each,
    print_results,
    print_tasks,
)
from quantexp.config.in_force import idle_rules
from quantexp.folders import for_shell, override_word, short_path
from quantexp.launch.label import differences, names
from quantexp.launch.outcome import Outcome
from quantexp.launch.progress import captured_size, proof_line, tokens_words
from quantexp.model.checkpoints import next_iteration, saved_iterations
from quantexp.model.label import describe_model
from quantexp.quant.label import describe_scheme, is_unquantised
from quantexp.runs.evaluation import read_evaluation
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import AutoDraw, Experiment, Precision
from quantexp.terminal.facts import Facts
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table
from quantexp.terminal.units import human_bytes
from quantexp.training.tracking.trackers import BACKENDS

#: How the columns model, dataset, scheme and `differs in` shrink.
_NAMES = (Shrink.CUT_END, Shrink.CUT_END, Shrink.CUT_START, Shrink.WRAP)
_COLOURS = {State.COMPLETED: "green", State.FAILED: "red", State.CANCELLED: "yellow"}


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print the summary of one run that completed or was skipped."""
    experiment, metrics = outcome.experiment, outcome.metrics
    table = Facts(console)
    table.add_row("state", _state(outcome))
    if outcome.reason:
        table.add_row("", escape(outcome.reason))
    table.add_row("model", escape(describe_model(experiment.model)))
    table.add_row("data", escape(str(experiment.dataset.label)))
    precision = experiment.training.precision
    table.add_row("scheme", escape(describe_scheme(str(experiment.quant.name), precision)))
    if (rules := idle_rules(experiment)) is not None:
        table.add_row("rules", f"[yellow]{escape(rules)}[/]")
    table.add_row("proof", proof_line(outcome.precision, precision))
    if outcome.verified is not None:
        table.add_row("numerics", escape(outcome.verified))
    if experiment.evaluate.only:
        _add_evaluated(table, outcome.run)
    elif metrics is not None:
        table.add_row(
            "training",
            f"iteration {metrics['iteration']}, loss {metrics['loss']:.4f}, "
            f"{tokens_words(outcome.speed)}, {metrics['memory_gb']:.1f} GB",
        )
        if (validation_loss := metrics.get("validation_loss")) is not None:
            perplexity = metrics["perplexity"]
            words = "beyond all bounds" if perplexity is None else f"{perplexity:,.2f}"
            words = f"loss {validation_loss:.4f}, perplexity {words}"
            if (high := metrics.get("unquantised_loss")) is not None:
                words += f"; unquantised {high:.4f} ({validation_loss - high:+.4f})"
            table.add_row("held out", words)
    if not experiment.evaluate.only:
        table.add_row("captured", _captured(outcome))
    for name, words in (("left out", outcome.left_out), ("dossiers", outcome.dossiers)):
        if words:
            table.add_row(name, f"[yellow]{escape(words)}[/]")
    for name, text in tracking_lines(outcome).items():
        table.add_row(name, escape(text))
    table.add_path("run", outcome.run.root)
    picture = outcome.run.figures / "quick_analysis.png"
    if picture.exists():
        table.add_path("picture", picture)
    if (outcome.run.figures / "tensor_stats.txt").exists():
        table.add_path("figures", outcome.run.figures)
    if outcome.run.report.exists():
        table.add_path("report", outcome.run.report)
    elif experiment.analysis.drawing is not AutoDraw.nothing:
        table.add_row("report", "not written (quantexp report writes it), see")
        table.add_path("", outcome.run.rank_log(0))
    table.print()
    if experiment.evaluate.only:
        scheme, evaluation = str(experiment.quant.name), read_evaluation(outcome.run)
        result = [Result(scheme, "", "", evaluation)]
        print_tasks(result, console)
        print_each(result, console)


def _add_evaluated(table: Facts, run: RunDir) -> None:
    evaluation = read_evaluation(run)
    if evaluation is None:
        return
    one = evaluation["scheme"]
    table.add_row("tokens", f"{one['tokens']:,} of {one['documents']:,} documents")
    for heading, words in evaluated_words(one).items():
        table.add_row(heading, words)


def print_how_to_go_on(run: RunDir, console: Console) -> None:
    """Print the commands that continue an interrupted run, each on its own line."""
    status, folder = read_status(run.status), for_shell(run.root)
    saved = saved_iterations(run)
    if status is not None:
        none = "" if saved else ", and no checkpoint was saved"
        first = next_iteration(run)
        again = "begin again at the first" if first == 1 else f"go on at iteration {first}"
        console.print(
            f"{status.iteration} of {status.iterations} iterations were complete{none}. To {again}:"
        )
    _print_command(f"quantexp resume {folder}", console)
    if saved:
        console.print("To begin another run with its last checkpoint:")
        start = override_word("training.start_from", f"{short_path(run.root)}@{saved[-1]}")
        _print_command(f"quantexp ... {start}", console)


def print_how_to_go_on_with_sweep(
    listing: Path, num_left: int, num_failed: int, num_runs: int, console: Console
) -> None:
    """Print the commands that continue an interrupted sweep: `resume` for pending runs, `retry` for failed ones."""
    if num_left:
        console.print(
            f"{num_left} of {num_runs} runs are left. To run them, each from its last checkpoint:"
        )
        _print_command(f"quantexp resume {for_shell(listing)}", console)
    if num_failed:
        console.print(f"{num_failed} failed. To run them again:")
        _print_command(f"quantexp retry {for_shell(listing)}", console)


def _print_command(command: str, console: Console) -> None:
    console.print(f"  [bold]{escape(command)}[/]", soft_wrap=True)


def tracking_lines(outcome: Outcome) -> dict[str, str]:
    """Tracker -> the run's address, or its error; TensorBoard, which is in the run folder, only with an error."""
    lines = {}
    for name, delivery in outcome.tracking.items():
        if delivery["trouble"]:
            end = (
                f"iterations up to {delivery['iteration']}" if delivery["iteration"] else "nothing"
            )
            lines[name] = f"received {end}: {delivery['trouble']}"
        elif name in BACKENDS and BACKENDS[name].REMOTE:
            lines[name] = str(delivery["where"])
    return lines


def print_sweep(
    outcomes: list[Outcome], failures: list[tuple[Experiment, str]], console: Console
) -> None:
    """Print the table of a sweep: one row for each run, with the gap to the bf16 run of the same model and data.

    `failures` are runs that could not start, with the reason. Model, dataset and other distinguishing options (the
    seed) have a column only if they differ.
    """
    experiments = [o.experiment for o in outcomes] + [experiment for experiment, _ in failures]
    if all(experiment.evaluate.only for experiment in experiments):
        states = [_word(outcome) for outcome in outcomes] + ["failed"] * len(failures)
        evaluations = [read_evaluation(outcome.run) for outcome in outcomes] + [None] * len(
            failures
        )
        options = map(" ".join, differences(experiments))
        schemes = (str(experiment.quant.name) for experiment in experiments)
        print_results(list(map(Result, schemes, options, states, evaluations)), console)
        _print_reasons(outcomes, failures, [names(e)[2:] for e in experiments], console)
        return
    named = [
        (*names(experiment), " ".join(differs))
        for experiment, differs in zip(experiments, differences(experiments), strict=True)
    ]
    shown = [i for i in range(4) if i == 2 or len({name[i] for name in named}) > 1]
    columns = [
        *(Column(("model", "dataset", "scheme", "differs in")[i], shrink=_NAMES[i]) for i in shown),
        Column("final loss", is_number=True),
        Column("gap to bf16", is_number=True),
        Column("tensors", worth=1, is_number=True),
        Column("captured", worth=2, is_number=True),
        Column("state"),
    ]
    rows = [
        [*(escape(name[i]) for i in shown), *_results(outcome, outcomes)]
        for name, outcome in zip(named, outcomes, strict=False)
    ]
    rows += [
        [*(escape(name[i]) for i in shown), *["-"] * 4, "[red]failed[/]"]
        for name in named[len(outcomes) :]
    ]
    title = f"{len(named)} run{'s' * (len(named) != 1)}"
    console.print(fitted_table(columns, rows, console.width, title).table)
    if any(_gap(outcome, outcomes) != "-" for outcome in outcomes):
        seeds = len({experiment.training.seed for experiment in experiments})
        console.print(
            "gap: one seed each, so it cannot be told from noise"
            if seeds == 1
            else f"gap: to the bf16 run of the same seed; how it varies over the {seeds} seeds is the noise",
            style="dim italic",
        )
    precisions = {experiment.training.precision for experiment in experiments}
    if precisions != {Precision.bf16}:
        words = ", ".join(sorted(precision.value for precision in precisions))
        line = f"scheme bf16 quantises nothing; the working precision of these runs is {words}"
        console.print(line, style="dim italic")
    _print_reasons(outcomes, failures, named, console)


def _print_reasons(
    outcomes: list[Outcome],
    failures: list[tuple[Experiment, str]],
    named: Sequence[tuple[str, ...]],
    console: Console,
) -> None:
    """Print why runs are waiting, or did not complete; `named` are the names of outcomes and failures."""
    waiting = Counter(o.reason for o in outcomes if o.state is State.PENDING)
    unsuccessful = [o for o in outcomes if o.state not in (State.COMPLETED, State.PENDING)]
    reasons = [(o.run.root.name, o.reason) for o in unsuccessful]
    not_started = [
        (" ".join(filter(None, name)), reason)
        for name, (_, reason) in zip(named[len(outcomes) :], failures, strict=True)
    ]
    for run, reason in [*reasons, *not_started]:
        console.print(f"[red]{escape(run)}[/]: {escape(reason)}", soft_wrap=True)
    for reason, count in waiting.items():
        console.print(f"{count} pending: {escape(reason)}", soft_wrap=True)


def _results(outcome: Outcome, outcomes: list[Outcome]) -> list[str]:
    metrics = outcome.metrics
    return [
        f"{metrics['loss']:.4f}" if metrics else "-",
        _gap(outcome, outcomes),
        str(outcome.tensors),
        human_bytes(outcome.num_bytes)
        if outcome.num_bytes or not outcome.tensors
        else "statistics",
        _state(outcome),
    ]


def _gap(outcome: Outcome, outcomes: list[Outcome]) -> str:
    """The loss above that of the bf16 run that differs only in the scheme; `-` if there is none."""
    baseline = next((o for o in outcomes if _is_baseline(o, outcome)), None)
    if baseline is None or not outcome.metrics or not baseline.metrics:
        return "-"
    if baseline.metrics["iteration"] != outcome.metrics["iteration"]:
        return "-"
    return f"{outcome.metrics['loss'] - baseline.metrics['loss']:+.4f}"


def _is_baseline(candidate: Outcome, outcome: Outcome) -> bool:
    experiment, other = outcome.experiment, candidate.experiment
    training = experiment.training
    if is_unquantised(str(experiment.quant.name)):
        training = replace(training, chaos=0)  # a perturbed run is held against the one that is not
    compared = (other.model, other.dataset, other.training)
    return is_unquantised(str(other.quant.name)) and compared == (
        experiment.model,
        experiment.dataset,
        training,
    )


def _captured(outcome: Outcome) -> str:
    level = outcome.experiment.capture.level.value
    if not outcome.tensors:
        return f"nothing (capture={level})"
    return captured_size(outcome.tensors, outcome.num_bytes)


def _state(outcome: Outcome) -> str:
    return f"[{_COLOURS.get(outcome.state, 'white')}]{_word(outcome)}[/]"


def _word(outcome: Outcome) -> str:
    return "skipped" if outcome.skipped else outcome.state.value
