"""Runs tasks of lm-evaluation-harness under a scheme and in bf16, and pairs the results document by document."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval import simple_evaluate

from quantexp.config.tasks import task_manager
from quantexp.errors import DataError, QuantexpError
from quantexp.extras.evaluate.summary import finite, interval
from quantexp.extras.evaluate.tasks.model import SchemeModel, generation_of
from quantexp.extras.evaluate.tasks.tokens import generation_config, task_tokenizer
from quantexp.runs.evaluation import TaskResult
from quantexp.training.log import LOG

if TYPE_CHECKING:
    from torch import Tensor

    from quantexp.data.tokenizers.protocol import Tokenizer
    from quantexp.extras.evaluate.evaluator import Evaluator
    from quantexp.quant.precision import PrecisionMap
    from quantexp.schema import EvaluateConfig, Experiment

#: Requests between two lines of the log.
_REPORTED = 50
#: Largest relative difference of a task's number from the mean of its documents for the two to count as equal.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class TaskResults:
    """Results of the tasks, and a line for each document."""

    results: list[TaskResult]
    #: A line for each document of each task.
    documents: list[dict[str, Any]]


class TaskRun:
    """The tasks of a run, under one precision map after the other."""

    def __init__(
        self,
        evaluator: Evaluator,
        experiment: Experiment,
        tokenizer: Tokenizer,
        weights: Path,
        require_going: Callable[[], None],
    ) -> None:
        """Take a run, and load its tasks, so that what cannot run fails before the first pass.

        Args:
            evaluator: of the run.
            experiment: of the run.
            tokenizer: of the run's data.
            weights: the folder of the evaluated weights, or a file in it.
            require_going: raises when the run must end.

        Raises:
            ConfigError: a task whose answers are not the likeliest tokens, or do not fit training.seq_length.
            DataError: the harness cannot load a task, or transformers the tokenizer.
        """
        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        self._evaluator, self._evaluate = evaluator, experiment.evaluate
        self._tokenizer = task_tokenizer(tokenizer, experiment.dataset.eod)
        self._generation = generation_config(weights)
        self._max_length = experiment.training.seq_length
        _require_tasks(experiment.evaluate, self._max_length, self._generation)
        self._require_going = require_going
        self._vocab_size = experiment.model.vocab_size

    def results(self) -> TaskResults:
        """Run the tasks with nothing quantised, and under the scheme.

        Raises:
            EngagementError: the first pass of either did not quantise exactly what is declared.
            ConfigError: an answer that does not fit training.seq_length.
            DataError: the harness cannot run a task.
        """
        bf16 = self._run("in bf16", self._evaluator.reference)
        scheme = self._run("under the scheme", self._evaluator.maps[0])
        return TaskResults(list(_results(scheme, bf16)), list(_documents(scheme, bf16)))

    def _run(self, words: str, declared: PrecisionMap) -> dict[str, Any]:
        passes, requests = itertools.count(), itertools.count(1)

        def advance() -> None:
            self._require_going()
            if (done := next(requests)) % _REPORTED == 0:
                LOG.info(f"tasks {words}: {done:,} requests done")

        def logits(tokens: Sequence[int]) -> Tensor:
            # The rows that pad the vocabulary are no tokens, and a published model has none.
            return self._evaluator.logits_of(next(passes), tokens, declared)[:, : self._vocab_size]

        model = SchemeModel(
            logits,
            self._tokenizer,
            self._max_length,
            advance,
            self._generation,
            score_template=self._evaluate.score_template,
        )
        evaluate = self._evaluate
        with _failures(evaluate):
            results: dict[str, Any] = simple_evaluate(
                model,
                tasks=list(evaluate.tasks),
                num_fewshot=evaluate.fewshot,
                limit=evaluate.limit,
                bootstrap_iters=0,
                task_manager=task_manager(evaluate),
            )
        LOG.info(f"tasks {words}: all {next(requests) - 1:,} requests done")
        if model.cut:
            LOG.warning(
                f"{model.cut:,} requests are longer than training.seq_length={self._max_length} and lost their "
                "beginning"
            )
        return results


@contextmanager
def _failures(evaluate: EvaluateConfig) -> Iterator[None]:
    """Convert what the harness raises.

    Raises:
        DataError: names the tasks.
    """
    try:
        yield
    except QuantexpError:
        raise
    except Exception as error:  # tasks run code of their own, which may raise anything
        LOG.exception("lm_eval fails")
        tasks = ", ".join(evaluate.tasks)
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"lm_eval fails on evaluate.tasks={tasks}: {first}; the rank's log has its traceback"
        ) from error


def _require_tasks(
    evaluate: EvaluateConfig, max_length: int, generation: Mapping[str, Any]
) -> None:
    with _failures(evaluate):
        tasks = task_manager(evaluate).load(list(evaluate.tasks))["tasks"]
    for name, task in tasks.items():
        if task.get_config("output_type") == "generate_until":
            options = task.get_config("generation_kwargs") or {}
            generation_of(name, options, max_length, generation)


def _results(scheme: dict[str, Any], bf16: dict[str, Any]) -> Iterator[TaskResult]:
    """A result for each metric of each task and group."""
    for task, numbers in scheme["results"].items():
        for key in numbers:
            metric, comma, chosen = key.partition(",")
            value, reference = numbers[key], bf16["results"][task][key]
            if (
                not comma
                or metric.endswith("_stderr")
                or not (_is_number(value) and _is_number(reference))
            ):
                continue
            ours, theirs = (_values(each, task, metric, chosen) for each in (scheme, bf16))
            is_mean = _is_mean(value, ours) and _is_mean(reference, theirs)
            differences = np.subtract(ours, theirs) if is_mean else np.empty(0)
            yield {
                "task": task,
                "metric": metric,
                "filter": chosen,
                "documents": len(ours),
                "value": finite(value),
                "bf16_value": finite(reference),
                "difference": finite(value - reference),
                "interval": interval(differences, np.ones(len(differences))),
                "changed": sum(map(_differ, ours, theirs)),
            }


def _values(results: dict[str, Any], task: str, metric: str, chosen: str) -> list[Any]:
    """The metric's value of each document: a number, or what the task makes its number of; none for a group."""
    samples = [each for each in results["samples"].get(task, ()) if each["filter"] == chosen]
    return [each.get(metric) for each in samples]


def _differ(ours: Any, theirs: Any) -> bool:
    """Whether a document counts differently; two NaN are equal."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) != len(theirs) or any(map(_differ, ours, theirs))
    if _is_number(ours) and _is_number(theirs):
        return not np.array_equal(ours, theirs, equal_nan=True)
    return not np.array_equal(ours, theirs)


def _is_mean(value: float, values: Sequence[Any]) -> bool:
    """Whether the task's number is the mean of the documents' numbers."""
    if not values or not all(map(_is_number, values)):
        return False
    return math.isclose(value, np.mean(values), rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _documents(scheme: dict[str, Any], bf16: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for task, samples in scheme["samples"].items():
        for ours, theirs in zip(samples, bf16["samples"][task], strict=True):
            yield {
                "task": task,
                "document": ours["doc_id"],
                "filter": ours["filter"],
                "scheme": _numbers(ours),
                "bf16": _numbers(theirs),
            }


def _numbers(sample: dict[str, Any]) -> dict[str, float | None]:
    """The metrics of one document that are numbers."""
    metrics: Sequence[str] = sample["metrics"]
    return {name: finite(sample[name]) for name in metrics if _is_number(sample[name])}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)
