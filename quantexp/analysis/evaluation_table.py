"""The tables of `quantexp evaluate`: a line for each evaluation, and which layers or modules hurt most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from quantexp.model.decoder import EMBEDDING, OUTPUT
from quantexp.runs.evaluation import Evaluated, Evaluation, TaskResult
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table

#: Layers or modules that are listed of each evaluation; the figure has all.
_MOST_LISTED = 8
#: From here on a metric has four digits instead of four decimals.
_LARGE = 10_000
_COLUMNS = (
    Column("scheme", shrink=Shrink.CUT_START),
    Column("differs in", shrink=Shrink.WRAP),
    Column("loss", is_number=True),
    Column("perplexity", is_number=True, worth=5),
    Column("to bf16", is_number=True),
    Column("95% interval", is_number=True),
    Column("top token", is_number=True, worth=3),
    Column("same as bf16", is_number=True, worth=4),
    Column("KL to bf16", is_number=True, worth=6),
    Column("state"),
)
_EACH = (
    Column("scheme", shrink=Shrink.CUT_START),
    Column("quantised alone"),
    Column("to bf16", is_number=True),
    Column("95% interval", is_number=True),
    Column("KL to bf16", is_number=True),
)
_TASKS = (
    Column("scheme", shrink=Shrink.CUT_START),
    Column("task"),
    Column("metric"),
    Column("value", is_number=True),
    Column("in bf16", is_number=True),
    Column("to bf16", is_number=True),
    Column("95% interval", is_number=True),
    Column("changed", is_number=True, worth=3),
    Column("documents", is_number=True, worth=4),
)


@dataclass(frozen=True)
class Result:
    """An evaluation as tables and figures show it."""

    scheme: str
    #: What tells it from others of the same scheme.
    differs: str
    state: str
    #: None for one without results.
    evaluation: Evaluation | None

    @property
    def name(self) -> str:
        """The scheme and what it differs in."""
        return " ".join(filter(None, (self.scheme, self.differs)))


def print_results(results: Sequence[Result], console: Console) -> None:
    """Print the tables."""
    rows = [
        [escape(one.scheme), escape(one.differs), *_cells(one), escape(one.state)]
        for one in results
    ]
    title = f"{len(results)} evaluation{'s' * (len(results) != 1)}"
    console.print(fitted_table(_COLUMNS, rows, console.width, title).table)
    known = [one.evaluation for one in results if one.evaluation is not None]
    if not known:
        return
    sizes = {(each["scheme"]["tokens"], each["scheme"]["documents"]) for each in known}
    of = "; ".join(f"{t:,} tokens of {d:,} documents" for t, d in sorted(sizes))
    notes = [
        f"loss in nats for a token, on {of}",
        "to bf16: difference to the same weights with nothing quantised, on the same tokens; interval over documents",
        "top token: how often the likeliest token is right; KL: of the distribution to bf16's, nats for a token",
    ]
    if any(each["scheme"].get("interval") is None for each in known):
        notes.append("no interval: it takes 8 documents or more, and finite losses")
    for line in notes:
        console.print(line, style="dim italic")
    print_tasks(results, console)
    print_each(results, console)


def _cells(result: Result) -> list[str]:
    if result.evaluation is None:
        return ["-"] * 7
    one = result.evaluation["scheme"]
    return [
        _number(one.get("loss"), ".4f"),
        _number(one.get("perplexity"), ",.2f"),
        _number(one.get("difference"), "+.4f"),
        interval_words(one),
        _number(one.get("accuracy"), ".2%"),
        _number(one.get("same_top"), ".2%"),
        _number(one.get("divergence"), ".2e"),
    ]


def print_tasks(results: Sequence[Result], console: Console) -> None:
    """Print the metrics of tasks, those of one task together; nothing without any."""
    metrics = [
        (result, one)
        for result in results
        if result.evaluation is not None
        for one in result.evaluation.get("tasks", [])
    ]
    if not metrics:
        return
    order = list(dict.fromkeys((one["task"], one["metric"], one["filter"]) for _, one in metrics))
    metrics.sort(
        key=lambda each: order.index((each[1]["task"], each[1]["metric"], each[1]["filter"]))
    )
    rows = [
        [
            escape(result.name),
            escape(one["task"]),
            escape(_metric(one)),
            _of_task(one["value"]),
            _of_task(one["bf16_value"]),
            _of_task(one["difference"], "+"),
            interval_words(one),
            f"{one['changed']:,}" if one["documents"] else "-",
            f"{one['documents']:,}" if one["documents"] else "-",
        ]
        for result, one in metrics
    ]
    console.print()
    console.print(fitted_table(_TASKS, rows, console.width, "tasks").table)
    note = "changed: documents that count differently than in bf16; interval over documents"
    console.print(note, style="dim italic")


def _of_task(value: float | None, sign: str = "") -> str:
    """A metric may be a share, or a perplexity of any size."""
    return _number(value, f"{sign}.4{'f' if value is None or abs(value) < _LARGE else 'g'}")


def _metric(one: TaskResult) -> str:
    return one["metric"] if one["filter"] == "none" else f"{one['metric']} ({one['filter']})"


def task_words(evaluation: Evaluation) -> dict[str, str]:
    """Heading -> a metric of a task in words."""
    words = {}
    for one in evaluation.get("tasks", []):
        low_high = interval_words(one)
        interval = "" if low_high == "-" else f", 95% interval {low_high} over documents"
        changed = f"; {one['changed']:,} of {one['documents']:,} documents count differently"
        words[f"{one['task']} {_metric(one)}"] = (
            f"{_of_task(one['value'])}, in bf16 {_of_task(one['bf16_value'])}, "
            f"difference {_of_task(one['difference'], '+')}{interval}{changed if one['documents'] else ''}"
        )
    return words


def print_each(results: Sequence[Result], console: Console) -> None:
    """Print the layers and modules that were quantised alone, those of the largest divergence; nothing without any."""
    rows, left_out = [], 0
    for result in results:
        each = [] if result.evaluation is None else result.evaluation["each"]
        worst = sorted(each, key=lambda one: -(one.get("divergence") or 0.0))
        left_out += max(0, len(worst) - _MOST_LISTED)
        rows += [
            [
                escape(result.name),
                part_words(one),
                _number(one.get("difference"), "+.4f"),
                interval_words(one),
                _number(one.get("divergence"), ".2e"),
            ]
            for one in worst[:_MOST_LISTED]
        ]
    if not rows:
        return
    console.print()
    title = "each by itself, the largest divergence first"
    console.print(fitted_table(_EACH, rows, console.width, title).table)
    if left_out:
        console.print(f"and {left_out} more, in the figure", style="dim italic")


def part_words(one: Evaluated) -> str:
    """`layer 3`, `layer 3 fc1`, `output layer` or `embedding`."""
    layer, module = one.get("layer"), one.get("module")
    if module in (OUTPUT, EMBEDDING):
        return "output layer" if module == OUTPUT else EMBEDDING
    return " ".join(filter(None, (f"layer {layer}", module)))


def evaluated_words(one: Evaluated) -> dict[str, str]:
    """Heading -> the numbers of an evaluation in words."""
    difference, low_high = _number(one.get("difference"), "+.4f"), interval_words(one)
    interval = "" if low_high == "-" else f", 95% interval {low_high} over documents"
    loss, perplexity = _number(one.get("loss"), ".4f"), _number(one.get("perplexity"), ",.2f")
    right, in_bf16 = _number(one.get("accuracy"), ".2%"), _number(one.get("bf16_accuracy"), ".2%")
    same = _number(one.get("same_top"), ".2%")
    return {
        "loss": f"{loss} nats a token, perplexity {perplexity}",
        "to bf16": f"{difference} nats a token{interval}",
        "top token": f"right {right}, in bf16 {in_bf16}; the same as in bf16 {same}",
        "KL": f"{_number(one.get('divergence'), '.2e')} nats a token from bf16",
    }


def interval_words(one: Evaluated | TaskResult) -> str:
    """`-0.0001 to +0.0020`, or `-`."""
    interval = one.get("interval")
    return "-" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
