"""Runs that start with published weights, on a text in bytes."""

from __future__ import annotations

import json
from pathlib import Path

from quantexp.config.compose import compose
from quantexp.data.sources import Document
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from tests.data.pairs import write_binary
from tests.model.huggingface.published import FAMILIES, published_model, write

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def data_words(tmp_path: Path) -> list[str]:
    """Arguments for a text in bytes, whose ids every model of 257 has."""
    documents = [Document(str(i), TEXT, "test") for i in range(8)]
    write_binary(documents, tmp_path / "data", ByteTokenizer())
    return [f"dataset.path={tmp_path / 'data'}", "dataset.tokenizer=byte"]


def folder_of(family: str, tmp_path: Path) -> Path:
    config = {**FAMILIES[family], "vocab_size": 257}
    return write(published_model(config), config, tmp_path / family)


def model_words(folder: Path) -> list[str]:
    return [f"model.from_hf={folder}", f"model.init_from={folder}", "training.seq_length=32"]


def experiment_of(words: list[str], tmp_path: Path, cache: Path) -> Experiment:
    small = [
        "training.iterations=2",
        "training.warmup_iterations=1",
        "training.global_batch_size=2",
    ]
    paths = [f"paths.cache={cache}", f"paths.root={tmp_path / 'runs'}"]
    own = [*small, *paths, "capture=off", "analysis.auto=false", *words]
    return compose(own, None, {})


def run_of(words: list[str], tmp_path: Path, cache: Path) -> RunDir:
    from quantexp.launch.attempt import open_run
    from quantexp.training.worker import Worker

    experiment = experiment_of(words, tmp_path, cache)
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        assert folder.ready, folder.skipped
        assert Worker(folder.run, experiment).run() == 0, folder.run.status.read_text()
    return folder.run


def first_loss(run: RunDir) -> float:
    return float(json.loads(run.metrics.read_text().splitlines()[0])["loss"])
