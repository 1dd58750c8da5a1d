"""Runs that read prepared data, from the command line to the tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.analysis.numerics.attention import layers_of, recomputed
from quantexp.capture.reader import open_capture
from quantexp.cli.main import main
from quantexp.config.compose import compose
from quantexp.data.prepared import complete, paths
from quantexp.data.sources import Document
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import ConfigError, DataError
from quantexp.launch.fingerprints import data_identity
from quantexp.runs.paths import RunDir
from quantexp.schema import TokenizerKind
from quantexp.schema.dataset import DatasetConfig
from tests.data.pairs import write_binary

from .prepare.made import lines, prepared, rows, texts
from .tokenizers.test_load import write_tokenizer

RunTiny = Callable[..., RunDir]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short texts, many to a sample, prepared by bytes."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.jsonl").write_bytes(lines(rows(texts(200, most=4))))
    return prepared(folder / "a.jsonl", folder / "web", split="90,10").prefix


def losses(run: RunDir) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


def test_a_run_reads_prepared_data_with_its_tokenizer_and_split(
    run_tiny: RunTiny, prefix: Path
) -> None:
    run = run_tiny(f"dataset.path={prefix}", "model.vocab_size=257", "dataset=dolma")
    assert len(losses(run)) == 2
    config = run.config.read_text()
    assert "tokenizer: byte" in config
    assert "split: 90,10" in config
    assert "label: dolma\n" in config


def test_masked_documents_are_hidden_from_each_other_in_the_attention(
    run_tiny: RunTiny, prefix: Path
) -> None:
    words = (f"dataset.path={prefix}", "model.vocab_size=257", "capture.attn_weights=true")
    plain = run_tiny(*words)
    masked = run_tiny(*words, "dataset.mask_documents=true", "dataset.mask_eod_loss=true")
    assert losses(plain)[0] != losses(masked)[0]
    for run, hidden in ((plain, False), (masked, True)):
        files = sorted(run.tensors.rglob("*_forward_post_FA_*_attn_weights.pt"))
        assert files
        P = torch.load(files[0], weights_only=True)["tensor"].float()
        T = P.shape[-1]
        below = P[..., torch.ones(T, T).tril().bool()]
        assert bool((below == 0).any()) is hidden
        assert (P[..., torch.ones(T, T).triu(1).bool()] == 0).all()
        assert torch.allclose(P.sum(-1), torch.ones(()), atol=2e-2)  # rounded to bf16
        assert_recomputed_like(P, run)


def assert_recomputed_like(P: torch.Tensor, run: RunDir) -> None:
    """Recomputed from query and key, P has the same mask in every sequence."""
    first = layers_of(open_capture(run.tensors))[0]
    query, key = first.tensors["query"], first.tensors["key"]
    for sequence in range(P.shape[0]):
        heads = torch.stack(list(recomputed(query, key, sequence)))
        assert torch.equal(heads == 0, P[sequence] == 0)
        # Scores and P are rounded to bf16 in the run: 2^-8 of a score of a few units.
        assert torch.allclose(heads, P[sequence], atol=3e-2)


def test_a_blend_trains_and_its_weights_are_its_identity(run_tiny: RunTiny, prefix: Path) -> None:
    other = prefix.with_name("wikipedia_text_document")
    write_binary([Document("1", "x" * 3000, "t")], other, ByteTokenizer())
    base = ["model.vocab_size=257", "dataset.tokenizer=byte", "dataset.split='90,10'"]
    both, single = f"dataset.blend={{{other}: 3, {prefix}: 1}}", f"dataset.blend={{{other}: 2}}"
    assert len(losses(run_tiny(*base, both))) == 2
    with pytest.raises(DataError, match=r"web was prepared with dataset\.split=90,10, got 1; drop"):
        run_tiny(*base, both, "dataset.split='1'")

    def tokens(blend: str) -> object:
        experiment = compose([*base, blend], None, {})
        return data_identity(experiment.dataset, 257)["tokens"]

    first = tokens(both)
    assert isinstance(first, list)
    assert [weight for _, weight in first] == [0.75, 0.25]
    assert tokens(f"dataset.blend={{{other}: 6, {prefix}: 2}}") == first
    assert tokens(f"dataset.blend={{{other}: 1, {prefix}: 1}}") != first
    assert tokens(single) == first[0][0]


def test_a_prepared_pair_brings_a_copy_of_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    file = write_tokenizer(tmp_path / "llama", {"?": 0, "owl": 1}, {"</s>": 2})
    (tmp_path / "a.jsonl").write_bytes(lines(rows(["owl owl", "an owl"])))
    kind: dict[str, Any] = {
        "tokenizer": TokenizerKind.huggingface,
        "tokenizer_path": str(file.parent),
    }
    prepared(tmp_path / "a.jsonl", tmp_path / "web", split="1", **kind)
    file.unlink()
    dataset = compose([f"dataset.path={tmp_path}/web"], None, {}).dataset
    assert dataset.tokenizer is TokenizerKind.huggingface
    assert dataset.tokenizer_path == f"{tmp_path}/web.tokenizer/tokenizer.json"
    assert dataset.split == "1"
    assert paths(dataset) == {tmp_path / "web": 1.0}
    assert "tokenizer" in data_identity(dataset, 3)
    write_tokenizer(tmp_path / "llama", {"?": 0, "owl": 1, "an": 3}, {"</s>": 2})
    words = [f"dataset.path={tmp_path}/web", f"dataset.tokenizer_path={tmp_path}/llama"]
    with pytest.raises(
        DataError, match=r"prepared with another tokenizer \(huggingface, 3 ids, .*4 ids"
    ):
        data_identity(compose([*words, "dataset.split='1'"], None, {}).dataset, 99)
    with pytest.raises(DataError, match=r"the tokenizer has 3 ids and model\.vocab_size is 2"):
        data_identity(dataset, 2)


def test_a_run_finds_what_prepare_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    write_tokenizer(tmp_path / "llama", {"?": 0, "owl": 1, "an": 3}, {"</s>": 2})
    (tmp_path / "a.jsonl").write_bytes(lines(rows(["owl owl", "an owl"])))
    owners = ["model=llama32-1b", "dataset=wikipedia", "quant=FA_linear_mxfp8"]
    words = ["dataset.source=a.jsonl", "dataset.tokenizer_path=llama", "dataset.split='1'"]
    assert main(["prepare", "dataset=wikipedia", *words]) == 0
    dataset = compose(owners, None, {}).dataset
    assert (dataset.path, dataset.split) == ("data/wikipedia", "1")
    assert dataset.tokenizer_path == "data/wikipedia.tokenizer/tokenizer.json"
    given = DatasetConfig(name="wikipedia", path=f"{tmp_path}/data/wikipedia")
    complete(given)
    assert data_identity(dataset, 4) == data_identity(given, 4)
    assert compose([*owners, "dataset.sample=true"], None, {}).dataset.path is None
    for other in ({"blend": {"data/wikipedia": 1}}, {"name": "dolma"}):
        others = DatasetConfig(**({"name": "wikipedia"} | other))
        complete(others)
        assert others.path is None
    (tmp_path / "data" / "wikipedia.bin").unlink()
    dataset = DatasetConfig(name="wikipedia")
    complete(dataset)
    with pytest.raises(DataError, match=r"expected data/wikipedia\.bin"):
        data_identity(dataset, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dataset.path=a", "dataset.blend={b: 1}"], r"dataset\.path=a and dataset\.blend exclude each"),
        (["dataset.blend={b: 0}"], r"dataset\.blend\[b\] must be .*0"),
        (["dataset.blend={b: x}"], r"dataset\.blend must be names with numbers such as .*got \{'b': 'x'\}"),
        (["dataset.blend=b"], r"dataset\.blend must be names with numbers such as .*got 'b'"),
        (["dataset.prepare.sources={b: 2}"], r"dataset\.prepare\.sources\[b\] must be a share in \(0, 1\], got 2"),
        (["dataset.prepare.sources={}"], r"dataset\.prepare\.sources must be names with numbers"),
        (["dataset.prepare.min_chars=0"], r"dataset\.prepare\.min_chars must be at least 1, got 0"),
        (["dataset.prepare.max_chars=0"], r"dataset\.prepare\.max_chars must be at least 1, got 0"),
        (["dataset.prepare.num_workers=0"], r"dataset\.prepare\.num_workers must be at least 1, got 0"),
        (["dataset.prepare.max_rejected=-1"], r"dataset\.prepare\.max_rejected must be at least 0, got -1"),
        (["training=fast", "dataset.eod=x"], r"dataset\.eod=x cannot hold with the built-in sample"),
        (["dataset.prepare.deduplikate=true"], r"unknown key dataset\.prepare\.deduplikate; did you mean dedu"),
    ],
)  # fmt: skip
def test_an_impossible_value_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(words, None, {})
