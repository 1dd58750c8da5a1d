"""A run that evaluates instead of training: one rank's share, its progress, and the results in the run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from quantexp.config.start_point import first_weights
from quantexp.extras.evaluate.summary import summary_of
from quantexp.runs.disk import writing
from quantexp.runs.evaluation import DOCUMENT_COLUMNS, write_evaluation
from quantexp.runs.fencing import require_ours
from quantexp.runs.status import Phase, now, write_json
from quantexp.training.context import RunContext
from quantexp.training.log import LOG
from quantexp.training.rank_session import rank_session

if TYPE_CHECKING:
    from quantexp.extras.evaluate.evaluator import Evaluator, Group
    from quantexp.extras.evaluate.tasks.harness import TaskResults


def evaluate_run(context: RunContext) -> None:
    """Evaluate the run's held-out samples.

    Raises:
        EngagementError: a pass did not quantise exactly what was declared.
        DataError: weights or samples are missing, or samples are too few.
    """
    experiment = context.experiment
    with rank_session(context) as (device, batches):
        from quantexp.extras.evaluate.evaluator import Evaluator
        from quantexp.training.megatron.data_loader import data_of
        from quantexp.training.megatron.numerics_state import use_numerics

        once = experiment.training.weight_cache
        with use_numerics(experiment, weights_once=once) as state:
            evaluator = Evaluator(experiment, device, state)
            tasks = None
            if experiment.evaluate.tasks:
                from quantexp.extras.evaluate.tasks.harness import TaskRun

                tokenizer = data_of(experiment)[1]
                weights = first_weights(experiment)
                assert weights is not None
                tasks = TaskRun(evaluator, experiment, tokenizer, weights, context.require_going)
            context.set_phase(Phase.EVALUATING)
            so_far = 0.0, 0
            for index, group in enumerate(evaluator.groups(batches.held_out()), 1):
                so_far = so_far[0] + group.loss * group.tokens, so_far[1] + group.tokens
                _record(context, index, group, so_far[0] / max(1, so_far[1]), evaluator)
            results = None
            if tasks is not None:
                context.set_phase(Phase.TASKS)
                results = tasks.results()
            _write(context, evaluator, results)
    context.status.trained = now()
    context.write_status()


def _record(
    context: RunContext, index: int, group: Group, loss: float, evaluator: Evaluator
) -> None:
    """Write a line of metrics.jsonl, the proof after the first group, and status.json.

    The line's `loss` is that of all tokens up to this group.
    """
    from quantexp.training.megatron.device import memory_gb

    context.require_going()
    run, status = context.run, context.status
    if context.rank.leads:
        require_ours(run)
        if group.verdict is not None:
            scheme = {"scheme": context.experiment.quant.name}
            write_json(run.precision, {**scheme, **group.verdict.record(), "earlier": []})
        line = {
            "iteration": index,
            "loss": loss if math.isfinite(loss) else None,
            "tokens": group.tokens,
            "step_time_s": group.seconds,
            "tokens_per_s": group.tokens / group.seconds,
            "memory_gb": memory_gb(evaluator.device),
            "time": now(),
        }
        text = json.dumps(line, allow_nan=False) + "\n"
        with writing(run.metrics, len(text)), run.metrics.open("a") as stream:
            stream.write(text)
        if context.tracking is not None:
            context.tracking.log({**line, "loss": loss})
        LOG.info(
            f"group {index} of {status.iterations}, loss {loss:.4f}, "
            f"{line['tokens_per_s']:,.0f} tokens/s"
        )
    status.iteration = index
    status.current_iteration = min(index + 1, status.iterations)
    context.set_phase(Phase.EVALUATING)


def _write(context: RunContext, evaluator: Evaluator, tasks: TaskResults | None) -> None:
    """Write the results of all ranks; every rank calls this."""
    documents, table = evaluator.table()
    if not context.rank.leads:
        return
    parts = [
        {"layer": part.layer, "module": part.module, **summary_of(table[:, index].numpy())}
        for index, part in enumerate(evaluator.parts)
    ]
    lines = _lines(documents, table[:, 0].tolist())
    of_tasks = () if tasks is None else (tasks.results, tasks.documents)
    write_evaluation(context.run, parts[0], parts[1:], lines, *of_tasks)


def _lines(documents: Iterable[int], sums: Iterable[list[float]]) -> list[dict[str, Any]]:
    return [
        {"document": document, **dict(zip(DOCUMENT_COLUMNS, row, strict=True))}
        for document, row in zip(documents, sums, strict=True)
    ]
