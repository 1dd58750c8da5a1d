"""The model and data of a run whose weights are evaluated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.config.from_run import from_run
from quantexp.config.load import save
from quantexp.errors import ConfigError
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from tests.conftest import TINY, TINY_MODELS


def recorded(root: Path, *words: str) -> Experiment:
    """The experiment of a run `root/trained`, which has a configuration and no checkpoint."""
    experiment = compose([*TINY, *words], None, {})
    run = RunDir(root / "trained")
    run.root.mkdir()
    save(experiment, run.config)
    return experiment


@pytest.mark.parametrize("model", TINY_MODELS)
def test_model_and_data_are_those_of_the_run(model: str, tmp_path: Path) -> None:
    own = ["training.precision=fp32", "evaluation.every=2", "evaluation.samples=4"]
    trained = recorded(tmp_path, *TINY_MODELS[model], *own)
    words = ["quant=linear_mxfp4"]
    evaluated = compose(
        [*from_run("trained@2", words, tmp_path), *words, "evaluate.only=true", "capture=off"],
        None,
        {},
    )
    assert evaluated.training.start_from == "trained@2"
    assert (evaluated.model, evaluated.dataset) == (trained.model, trained.dataset)
    assert evaluated.evaluation.samples == 4
    for key in ("seq_length", "micro_batch_size", "precision"):
        assert getattr(evaluated.training, key) == getattr(trained.training, key)


def test_given_keys_take_precedence(tmp_path: Path) -> None:
    recorded(tmp_path)
    given = [
        "dataset=dolma",
        "dataset.path=text",
        "dataset.tokenizer=byte",
        "training.seq_length=32",
    ]
    words = from_run("trained@2", given, tmp_path)
    evaluated = compose([*words, *given, "evaluate.only=true", "capture=off"], None, {})
    assert (evaluated.dataset.name, evaluated.dataset.path) == ("dolma", "text")
    assert (evaluated.model.hidden_size, evaluated.training.seq_length) == (128, 32)


@pytest.mark.parametrize(
    ("run", "given", "message"),
    [
        (
            "trained",
            [],
            "trained needs the iteration of a checkpoint, RUN@ITERATION: the run has none",
        ),
        ("trained@2", ["training=fast"], "which a preset would cut: drop training="),
        ("trained@x", [], "training.start_from must be RUN@ITERATION, got 'trained@x'"),
    ],
)
def test_what_cannot_be_taken_is_refused(
    run: str, given: list[str], message: str, tmp_path: Path
) -> None:
    recorded(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_run(run, given, tmp_path)
