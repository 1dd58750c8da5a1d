"""A run that starts with published weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quantexp.cli.plan_record import make_plan
from quantexp.config.compose import compose
from quantexp.errors import ConfigError, DataError
from tests.model.huggingface.published import FAMILIES, published_model, write
from tests.model.huggingface.runs import data_words, first_loss, folder_of, model_words, run_of


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    return data_words(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_first_loss_is_the_published_models(
    family: str, tmp_path: Path, data: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, over Megatron's padded vocabulary: 127 more ids with logit 0; sums of 64 losses to 1e-5."""
    import quantexp.training.megatron.data_loader as loader

    inputs: list[dict[str, torch.Tensor]] = []
    batches = loader.batches

    def record(*args: object, **kwargs: object) -> object:
        for batch in batches(*args, **kwargs):  # type: ignore[arg-type]
            inputs.append(batch)
            yield batch

    monkeypatch.setattr(loader, "batches", record)
    folder = folder_of(family, tmp_path)
    words = [*model_words(folder), *data, "training.precision=fp32", "training.micro_batch_size=2"]
    run = run_of(words, tmp_path, cache)
    config = {**FAMILIES[family], "vocab_size": 257}
    with torch.no_grad():
        logits = published_model(config)(inputs[0]["tokens"]).logits
    padded = torch.nn.functional.pad(logits, (0, 384 - 257))
    expected = torch.nn.functional.cross_entropy(
        padded.flatten(0, 1), inputs[0]["labels"].flatten()
    )
    assert first_loss(run) == pytest.approx(float(expected), rel=1e-5)
    identity = json.loads(run.provenance.read_text())["identity"]
    assert len(identity["model"]["initial_weights"]) == 64


def test_built_in_sample_is_refused_with_published_weights(tmp_path: Path) -> None:
    folder = folder_of("llama31", tmp_path)
    with pytest.raises(
        ConfigError, match=r"init_from=.* cannot hold with the built-in sample, whose byte tok"
    ):
        compose([*model_words(folder), "training=fast"], None, {})


def test_plan_reports_unsuitable_weights(tmp_path: Path, data: list[str]) -> None:
    folder = folder_of("llama31", tmp_path)
    words = [*model_words(folder), *data, "model.num_layers=1"]
    missing = make_plan(compose(words, None, {})).missing
    assert missing is not None
    assert "model.num_layers is 1 and its config.json says 2" in missing
    assert make_plan(compose([*model_words(folder), *data], None, {})).missing is None


def test_tokenizer_with_more_ids_than_the_published_model_is_refused(
    tmp_path: Path, data: list[str], cache: Path
) -> None:
    config = FAMILIES["llama31"]  # 201 ids
    folder = write(published_model(config), config, tmp_path / "small")
    with pytest.raises(
        DataError, match=r"the tokenizer has 257 ids and model\.vocab_size is 201; give the mod"
    ):
        run_of([*model_words(folder), *data], tmp_path, cache)
