"""The synthetic language: its entropy, its documents, and that it is prepared as other data is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from quantexp.config.compose import compose
from quantexp.data import synthetic
from quantexp.data.sample import SYNTHETIC_VERSION, sample_fingerprint, sample_prefix
from tests.data.pairs import text_of


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 documents of 2,000 symbols."""
    monkeypatch.setattr(synthetic, "NUM_DOCUMENTS", 16)
    monkeypatch.setattr(synthetic, "DOCUMENT_LENGTH", 2000)


@pytest.fixture
def simple(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A source of 4 symbols with 16 contexts."""
    values = {"SYMBOLS": "abcd", "SHARES": (0.7, 0.3), "_NUM_CONTEXTS": 16}
    for name, value in values.items():
        monkeypatch.setattr(synthetic, name, value)
    synthetic._source.cache_clear()
    yield
    synthetic._source.cache_clear()


def entropy_rate() -> float:
    """The entropy of a symbol whose context is known, in nats; 200 steps lead to the stationary state."""
    p_CS = synthetic._source()
    state_C = np.full(len(p_CS), 1 / len(p_CS))
    for _ in range(200):
        # The first symbol of a context is forgotten, so contexts that differ in it alone lead to the same ones.
        moved = (state_C[:, None] * p_CS).reshape(len(synthetic.SYMBOLS), -1).sum(0)
        state_C = moved / moved.sum()
    return float(-(state_C[:, None] * p_CS * np.log(p_CS)).sum())


def test_entropy_is_that_of_the_stationary_state(simple: None) -> None:
    """The state by eigenvectors of the whole matrix, instead of steps."""
    p = synthetic._source()
    matrix = np.zeros((16, 16))
    for context in range(16):
        matrix[context, context % 4 * 4 : context % 4 * 4 + 4] = p[context]
    values, vectors = np.linalg.eig(matrix.T)
    state = np.real(vectors[:, np.argmax(np.real(values))])
    state /= state.sum()
    assert entropy_rate() == pytest.approx(-(state[:, None] * p * np.log(p)).sum())


def test_documents_cost_a_model_that_knows_the_source_its_entropy(few: None) -> None:
    """Mean of -log p over 32,000 symbols; its standard error is below 1%, as -log p has a deviation near its mean."""
    p = synthetic._source()
    logs = []
    for document in synthetic._symbols():
        context = np.array([document[:-3], document[1:-2], document[2:-1]]).T @ [1024, 32, 1]
        logs.append(-np.log(p[context, document[3:]]))
    assert np.mean(np.concatenate(logs)) == pytest.approx(entropy_rate(), rel=0.04)


def test_a_longer_context_tells_more(few: None) -> None:
    """Cross-entropies of the true distributions given fewer symbols; the contexts are averaged alike, near uniform."""
    p = synthetic._source().reshape(32, 32, 32, 32)
    known = [p.mean((0, 1, 2)), p.mean((0, 1)), p.mean(0), p]
    entropies = []
    for document in synthetic._symbols():
        a, b, c, following = (document[i : len(document) - 3 + i] for i in range(4))
        chances = (known[0][following], known[1][c, following], known[2][b, c, following])
        entropies.append([-np.log(each).mean() for each in (*chances, p[a, b, c, following])])
    assert np.diff(np.mean(entropies, axis=0)).max() < -0.2


def test_entropy_of_the_shipped_source() -> None:
    assert entropy_rate() == pytest.approx(2.38001, abs=1e-5)


def test_the_same_documents_are_written_everywhere(few: None, tmp_path: Path) -> None:
    """Identity names the version, not the content, so another content needs another version."""
    file = tmp_path / "documents"
    synthetic.write_documents(file)
    lines = file.read_text().splitlines()
    assert [len(json.loads(line)["text"]) for line in lines] == [2000] * 16
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (SYNTHETIC_VERSION, digest[:16]) == (1, "039288decb8e56c7")


def test_it_is_prepared_by_bytes(few: None, tmp_path: Path) -> None:
    prefix = sample_prefix("synthetic", tmp_path)
    assert prefix.name.startswith("synthetic-sample-")
    assert sample_fingerprint("synthetic") == "synthetic-1"
    file = tmp_path / "documents"
    synthetic.write_documents(file)
    dataset = IndexedDataset(str(prefix))
    assert len(dataset) == 16
    texts = [text_of(int(i) for i in dataset[n]) for n in range(len(dataset))]
    written = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    assert sorted(texts) == sorted(written), "in the order of their splits"


@pytest.mark.parametrize(("model", "parameters"), [("tiny", 4_983_808), ("small", 25_306_112)])
def test_models_for_it_have_the_size_that_they_name(model: str, parameters: int) -> None:
    from quantexp.model.sizes import num_parameters

    experiment = compose([f"model={model}", "dataset=synthetic"], None, {})
    assert experiment.dataset.label == "synthetic (generated)"
    assert num_parameters(experiment.model) == parameters
