"""The results of `quantexp evaluate` in a run folder.

evaluation.json     the numbers under the scheme, and of each layer or module that was evaluated by itself
documents.jsonl     the sums over the tokens of each held-out document, under the scheme and in bf16
tasks.jsonl         with tasks: what each document of each task counts, under the scheme and in bf16
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, Required, TypedDict

from quantexp.reading.json_files import require_json
from quantexp.reading.typed import Count
from quantexp.runs.disk import write_whole
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import does_only
from quantexp.runs.status import write_json

#: The sums of a line of documents.jsonl, in the order of `quantexp.extras.evaluate.token_measures.TokenMeasure`.
DOCUMENT_COLUMNS = (
    "tokens",
    "loss",
    "bf16_loss",
    "correct",
    "bf16_correct",
    "same_top",
    "divergence",
)


class Evaluated(TypedDict, total=False):
    """The numbers of the scheme, or of the scheme in one layer or module; null where a number is not finite."""

    #: None for the whole scheme.
    layer: Count | None
    #: None for a whole layer.
    module: str | None
    tokens: Required[Count]
    documents: Required[Count]
    #: Nats for a token.
    loss: Required[float | None]
    perplexity: float | None
    bf16_loss: float | None
    #: Of the loss to that in bf16, nats; the 95% interval over resampled documents, None with too few of them.
    difference: Required[float | None]
    interval: list[float] | None
    #: The share of tokens whose largest logit is that of the right token.
    accuracy: float | None
    bf16_accuracy: float | None
    #: The share of tokens whose largest logit is that of bf16.
    same_top: float | None
    #: The mean Kullback-Leibler divergence of the distribution from that in bf16, nats.
    divergence: float | None


class TaskResult(TypedDict):
    """A metric of a task, or of a group of tasks; null where a number is not finite."""

    task: str
    metric: str
    #: How the harness takes the answer from the output; `none` for most tasks.
    filter: str
    #: 0 for a group.
    documents: Count
    value: float | None
    bf16_value: float | None
    difference: float | None
    #: Of the difference: 95%, over resampled documents; None with too few, or if the metric is not their mean.
    interval: list[float] | None
    #: Documents that count differently.
    changed: Count


class Evaluation(TypedDict):
    """The content of evaluation.json."""

    scheme: Evaluated
    each: list[Evaluated]
    tasks: NotRequired[list[TaskResult]]


#: In the folder's name, after the scheme.
SUFFIX = "_evaluated"


def is_evaluation(run: RunDir) -> bool:
    """Whether a run evaluates instead of training; a run whose config.yaml cannot be read trains."""
    return f"{SUFFIX}-" in run.root.name and does_only(run, "evaluate")


def write_evaluation(
    run: RunDir,
    scheme: Mapping[str, Any],
    each: Sequence[Mapping[str, Any]],
    documents: Iterable[Mapping[str, Any]],
    tasks: Sequence[TaskResult] = (),
    task_documents: Iterable[Mapping[str, Any]] = (),
) -> None:
    """Write the files; evaluation.json comes last, so it stands for complete results."""
    write_whole(run.documents, _lines(documents))
    if tasks:
        write_whole(run.task_documents, _lines(task_documents))
    content = {"scheme": dict(scheme), "each": [dict(one) for one in each]}
    write_json(run.evaluation, {**content, **({"tasks": list(tasks)} if tasks else {})})


def _lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in records)


def read_evaluation(run: RunDir) -> Evaluation | None:
    """The results; None if there are none.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(run.evaluation, Evaluation) if run.evaluation.exists() else None
