"""A run that begins with published weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantexp.compose import compose
from quantexp.data.binary import write_binary
from quantexp.data.sources import Document
from quantexp.data.tokenizer import ByteTokenizer
from quantexp.errors import ConfigError, DataError
from quantexp.paths import RunDir
from quantexp.plan import make_plan
from tests.huggingface.published import FAMILIES, published_model, write

RunTiny = Callable[..., RunDir]
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Words for a text in bytes, whose ids every model of 257 has."""
    write_binary(
        [Document(str(i), TEXT, "test") for i in range(8)], tmp_path / "data", ByteTokenizer()
    )
    return [f"dataset.path={tmp_path / 'data'}", "dataset.tokenizer=byte"]


def folder_of(family: str, tmp_path: Path) -> Path:
    config = {**FAMILIES[family], "vocab_size": 257}
    return write(published_model(config), config, tmp_path / family)


def words_for(folder: Path) -> list[str]:
    return [f"model.from_hf={folder}", f"model.init_from={folder}", "training.seq_length=32"]


def own_run(words: list[str], tmp_path: Path, cache: Path) -> RunDir:
    from quantexp.record import opened
    from quantexp.worker import Worker

    small = [
        "training.iterations=2",
        "training.warmup_iterations=1",
        "training.global_batch_size=2",
    ]
    paths = [f"paths.cache={cache}", f"paths.root={tmp_path / 'runs'}"]
    experiment = compose([*words, *small, *paths, "capture=off", "analysis.auto=false"], None, {})
    with opened(experiment, "cpu", ["test"]) as (folder, _):
        assert Worker(folder.run, experiment).run() == 0, folder.run.status.read_text()
    return folder.run


def first_loss(run: RunDir) -> float:
    return float(json.loads(run.metrics.read_text().splitlines()[0])["loss"])


@pytest.mark.parametrize("family", FAMILIES)
def test_first_loss_is_the_published_models(
    family: str, tmp_path: Path, data: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, over the padded vocabulary as Megatron has it: 127 more ids of logit 0; sums of 64 losses to 1e-5."""
    import quantexp.data.loader as loader

    seen: list[dict[str, torch.Tensor]] = []
    batches = loader.batches

    def watched(*args: object, **kwargs: object) -> object:
        for batch in batches(*args, **kwargs):  # type: ignore[arg-type]
            seen.append(batch)
            yield batch

    monkeypatch.setattr(loader, "batches", watched)
    folder = folder_of(family, tmp_path)
    words = [*words_for(folder), *data, "training.precision=fp32", "training.micro_batch_size=2"]
    run = own_run(words, tmp_path, cache)
    config = {**FAMILIES[family], "vocab_size": 257}
    with torch.no_grad():
        logits = published_model(config)(seen[0]["tokens"]).logits
    padded = torch.nn.functional.pad(logits, (0, 384 - 257))
    expected = torch.nn.functional.cross_entropy(padded.flatten(0, 1), seen[0]["labels"].flatten())
    assert first_loss(run) == pytest.approx(float(expected), rel=1e-5)
    identity = json.loads(run.provenance.read_text())["identity"]
    assert len(identity["model"]["initial_weights"]) == 64


def test_built_in_sample_is_refused_with_published_weights(tmp_path: Path) -> None:
    folder = folder_of("llama31", tmp_path)
    with pytest.raises(
        ConfigError, match=r"init_from=.* cannot hold with the built-in sample, whose byte tok"
    ):
        compose([*words_for(folder), "training=fast"], None, {})


def test_plan_says_what_is_wrong_with_the_weights(tmp_path: Path, data: list[str]) -> None:
    folder = folder_of("llama31", tmp_path)
    words = [*words_for(folder), *data, "model.num_layers=1"]
    missing = make_plan(compose(words, None, {})).missing
    assert missing is not None
    assert "model.num_layers is 1 and its config.json says 2" in missing
    assert make_plan(compose([*words_for(folder), *data], None, {})).missing is None


def test_tokenizer_with_more_ids_than_the_published_model_is_refused(
    tmp_path: Path, data: list[str], cache: Path
) -> None:
    config = FAMILIES["llama31"]  # 201 ids
    folder = write(published_model(config), config, tmp_path / "small")
    with pytest.raises(
        DataError, match=r"the tokenizer has 257 ids and model\.vocab_size is 201; give the mod"
    ):
        own_run([*words_for(folder), *data], tmp_path, cache)
