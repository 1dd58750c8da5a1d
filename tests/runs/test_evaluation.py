"""The results of an evaluation on disk, and what is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantexp.errors import UnreadableError
from quantexp.runs.evaluation import is_evaluation, read_evaluation, write_evaluation
from quantexp.runs.paths import RunDir

ONE = {"tokens": 4, "documents": 1, "loss": 2.0, "bf16_loss": 1.5, "difference": 0.5}


def run(tmp_path: Path, name: str, config: str) -> RunDir:
    made = RunDir(tmp_path / name)
    made.root.mkdir()
    made.config.write_text(config)
    return made


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("m_d_mxfp8_evaluated-12345678", "evaluate: {only: true}\n", True),
        ("m_d_mxfp8_evaluated-12345678", "evaluate: {only: false}\n", False),
        ("m_d_mxfp8_evaluated-12345678", "training: {lr: 1}\n", False),
        ("m_d_mxfp8_evaluated-12345678", "evaluate: [", False),
        ("m_d_mxfp8-12345678", "evaluate: {only: true}\n", False),
    ],
)
def test_evaluation_is_named_and_configured_so(
    name: str, config: str, expected: bool, tmp_path: Path
) -> None:
    assert is_evaluation(run(tmp_path, name, config)) is expected


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = run(tmp_path, "m_d_mxfp8_evaluated-1", "")
    assert read_evaluation(made) is None
    write_evaluation(made, ONE, [ONE | {"layer": 0}], [{"document": 3, "tokens": 4.0}])
    assert read_evaluation(made) == {"scheme": ONE, "each": [ONE | {"layer": 0}]}
    assert json.loads(made.documents.read_text()) == {"document": 3, "tokens": 4.0}


def test_damaged_results_are_named(tmp_path: Path) -> None:
    made = run(tmp_path, "m_d_mxfp8_evaluated-1", "")
    made.evaluation.write_text(json.dumps({"scheme": ONE | {"tokens": "many"}, "each": []}))
    with pytest.raises(
        UnreadableError,
        match=r"evaluation\.json: scheme\.tokens must be a whole number from 0, got 'many'",
    ):
        read_evaluation(made)
