"""Results of tasks: pairs of documents, intervals, and what is no metric; errors of the harness in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import ConfigError, DataError
from quantexp.extras.evaluate.tasks.harness import TaskRun
from quantexp.schema import EvaluateConfig

Patch = pytest.MonkeyPatch


def results(accuracy: list[int], generated: list[str], share: float) -> dict[str, Any]:
    """What the harness returns of a task with two filters, and of a group."""

    def sample(i: int, chosen: str, **metrics: Any) -> dict[str, Any]:
        return {"doc_id": i, "filter": chosen, "metrics": list(metrics), **metrics}

    return {
        "results": {
            "task": {
                "alias": "task",
                "sample_len": len(accuracy),
                "acc,none": float(np.mean(accuracy)),
                "acc_stderr,none": "N/A",
                "f1,strict": share,
            },
            "group": {"acc,none": float(np.mean(accuracy))},
        },
        "samples": {
            "task": [
                *(sample(i, "none", acc=one) for i, one in enumerate(accuracy)),
                *(sample(i, "strict", f1=(one, "right")) for i, one in enumerate(generated)),
            ]
        },
    }


def task_run() -> TaskRun:
    evaluate = EvaluateConfig(tasks=["task", "other"])
    experiment: Any = SimpleNamespace(
        evaluate=evaluate,
        training=SimpleNamespace(seq_length=8),
        model=SimpleNamespace(vocab_size=4),
        dataset=SimpleNamespace(eod=None),
    )
    evaluator: Any = SimpleNamespace(reference="reference", maps=["scheme"])
    return TaskRun(evaluator, experiment, ByteTokenizer(), Path("none"), lambda: None)


def patched(patch: Patch, *returned: dict[str, Any] | Exception) -> None:
    """The harness returns these, one after the other."""
    left = list(returned)

    def simple_evaluate(*_: Any, **__: Any) -> dict[str, Any]:
        one = left.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    patch.setattr("quantexp.extras.evaluate.tasks.harness.simple_evaluate", simple_evaluate)
    loaded(patch, {})


def loaded(patch: Patch, tasks: dict[str, Any]) -> None:
    """The harness loads these."""
    manager = SimpleNamespace(load=lambda _: {"tasks": tasks})
    patch.setattr("quantexp.extras.evaluate.tasks.harness.task_manager", lambda _: manager)


def test_documents_are_paired(monkeypatch: Patch) -> None:
    bf16 = results([1, 1, 1, 1, 0, 0, 0, 0], ["a", "b"], 0.5)
    scheme = results([0, 1, 1, 1, 1, 0, 0, 0], ["a", "c"], 0.25)
    patched(monkeypatch, bf16, scheme)
    found = task_run().results()
    accuracy, f1, group = found.results
    assert (accuracy["task"], accuracy["metric"], accuracy["filter"]) == ("task", "acc", "none")
    assert (accuracy["value"], accuracy["bf16_value"], accuracy["difference"]) == (0.5, 0.5, 0.0)
    assert accuracy["changed"] == 2, "one became wrong and one right"
    assert accuracy["interval"] is not None
    low, high = accuracy["interval"]
    assert low < 0 < high
    assert (f1["filter"], f1["changed"], f1["documents"], f1["interval"]) == ("strict", 1, 2, None)
    assert (group["task"], group["documents"], group["interval"]) == ("group", 0, None)
    assert found.documents[0] == {
        "task": "task",
        "document": 0,
        "filter": "none",
        "scheme": {"acc": 0.0},
        "bf16": {"acc": 1.0},
    }
    assert found.documents[-1]["scheme"] == {}


def test_a_metric_that_is_not_the_mean_of_its_documents_has_no_interval(
    monkeypatch: Patch,
) -> None:
    one = results([1, 0] * 4, [], 0.0)
    one["results"]["task"]["acc,none"] = 0.7
    patched(monkeypatch, one, one)
    assert task_run().results().results[0]["interval"] is None


def test_a_failure_of_the_harness_is_one_line(monkeypatch: Patch) -> None:
    patched(monkeypatch, ConnectionError("no route to the hub\nand more"))
    words = r"^lm_eval fails on evaluate\.tasks=task, other: no route to the hub; the rank's log has its traceback$"
    with pytest.raises(DataError, match=words):
        task_run().results()
    patched(monkeypatch, KeyError())
    with pytest.raises(DataError, match=r"task, other: KeyError; the rank's log"):
        task_run().results()


def test_what_cannot_run_is_refused_before_the_first_pass(monkeypatch: Patch) -> None:
    options = {"output_type": "generate_until", "generation_kwargs": {"max_new_tokens": 9}}
    loaded(monkeypatch, {"task": SimpleNamespace(get_config=options.get)})
    words = (
        r"^training\.seq_length=8 is too short for an answer of up to 9 tokens; set a larger one$"
    )
    with pytest.raises(ConfigError, match=words):
        task_run()


def test_a_task_that_cannot_be_loaded_is_refused_before_the_first_pass(monkeypatch: Patch) -> None:
    def load(_: list[str]) -> None:
        raise ValueError("duplicate tasks")

    manager = SimpleNamespace(load=load)
    monkeypatch.setattr("quantexp.extras.evaluate.tasks.harness.task_manager", lambda _: manager)
    with pytest.raises(DataError, match=r"^lm_eval fails on .*: duplicate tasks; the rank's log"):
        task_run()


@pytest.mark.parametrize(
    ("ours", "theirs", "changed"),
    [
        ((0, np.array([0.5, 0.5])), (0, np.array([0.5, 0.5])), 0),
        ((0, np.array([0.5, 0.5])), (0, np.array([0.4, 0.6])), 1),
        (float("nan"), float("nan"), 0),
        (["a"], ["a", "b"], 1),
        ("a", "b", 1),
    ],
)
def test_a_document_may_count_anything(
    ours: Any, theirs: Any, changed: int, monkeypatch: Patch
) -> None:
    one, other = results([1], [], 0.5), results([1], [], 0.5)
    for each, value in ((one, theirs), (other, ours)):
        each["samples"]["task"][0]["acc"] = value
    patched(monkeypatch, one, other)
    assert task_run().results().results[0]["changed"] == changed
