from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.data.prepared import read_card
from quantexp.data.sample import read_sample
from quantexp.data.sources import Document
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import DataError
from quantexp.runs.ranks import Rank
from quantexp.training.log import LOG
from quantexp.training.megatron.data_loader import Datasets, batches, rank_batches
from quantexp.training.megatron.sample_order import open_pair
from tests.data.pairs import text_of, write_binary
from tests.data.side_by_side import side_by_side

from .conftest import N, T, tokens_of


def test_a_batch_has_shifted_labels_full_loss_and_positions(
    build: Callable[..., Datasets],
) -> None:
    train = build().train
    batch = next(batches(train, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1))
    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert all(value.shape == (4, T) for value in batch.values())
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["loss_mask"], torch.ones(4, T))
    assert torch.equal(batch["position_ids"], torch.arange(T).expand(4, T))


def test_samples_are_windows_of_the_joined_documents(build: Callable[..., Datasets]) -> None:
    texts = [document.text for document in read_sample("wikipedia")]
    whole = [text for text in texts if len(text.encode()) > T]
    tokenizer = ByteTokenizer()
    for row in tokens_of(build().train)[:10].tolist():
        parts = [text_of(p).strip("\ufffd") for p in _split(row, tokenizer.eod)]
        assert all(any(part in text for text in whole) for part in parts)


def _split(ids: list[int], at: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for i in ids:
        if i == at:
            parts.append([])
        else:
            parts[-1].append(i)
    return parts


def test_each_token_is_in_the_document_that_its_sample_names(
    build: Callable[..., Datasets], prefix: Path
) -> None:
    length = 1024
    pair, train = open_pair(prefix), build(names_documents=True, seq_length=length).train
    boundaries = 0
    for index in range(20):
        sample = train[index]
        documents, tokens = sample["documents"], sample["tokens"]
        assert documents.shape == tokens.shape == (length,)
        for document in documents.unique().tolist():
            own = tokens[documents == document].tolist()
            whole = pair.get(document).tolist()
            assert any(whole[at : at + len(own)] == own for at in range(len(whole)))
        changes = (documents[1:] != documents[:-1]).nonzero().flatten()
        assert all(tokens[change] == ByteTokenizer().eod for change in changes)
        boundaries += len(changes)
    assert boundaries > 3


def test_documents_of_different_pairs_of_a_blend_differ(
    build: Callable[..., Datasets], letters: dict[Path, float]
) -> None:
    train = build(letters, names_documents=True).train
    single = {"micro_batch_size": 4, "data_parallel_rank": 0, "data_parallel_size": 1}
    letters_of: dict[int, set[int]] = {}
    for batch in islice(batches(train, **single), 6):
        for document, token in zip(
            batch["documents"].flatten(), batch["tokens"].flatten(), strict=True
        ):
            if int(token) != ByteTokenizer().eod:
                letters_of.setdefault(int(document) >> 32, set()).add(int(token))
    assert len(letters_of) == len(letters)
    assert all(len(of_pair) == 1 for of_pair in letters_of.values())


def test_held_out_samples_need_no_training_samples(build: Callable[..., Datasets]) -> None:
    both = build(num_samples_valid=4)
    alone = build(num_samples_train=0, num_samples_valid=4)
    assert len(alone.train) == 0
    assert alone.valid is not None
    assert both.valid is not None
    assert torch.equal(tokens_of(alone.valid)[:4], tokens_of(both.valid)[:4])


def test_the_same_seed_gives_the_same_samples_from_another_cache(
    build: Callable[..., Datasets], tmp_path: Path
) -> None:
    first = tokens_of(build().train)
    assert torch.equal(tokens_of(build().train), first)
    assert torch.equal(tokens_of(build(cache_dir=tmp_path / "other").train), first)


def test_another_seed_gives_another_order(build: Callable[..., Datasets]) -> None:
    first, second = build().train, build(seed=2).train
    assert not torch.equal(tokens_of(first)[:8], tokens_of(second)[:8])


def test_validation_does_not_change_the_training_samples(
    build: Callable[..., Datasets],
) -> None:
    without, with_valid = build(), build(num_samples_valid=5)
    assert without.valid is None
    assert with_valid.valid is not None
    assert len(with_valid.valid) >= 5
    assert torch.equal(tokens_of(without.train), tokens_of(with_valid.train))


def test_samples_beyond_an_epoch_come_from_further_epochs(
    build: Callable[..., Datasets],
) -> None:
    assert len(build(num_samples_train=3000).train) >= 3000


def test_a_sample_may_be_longer_than_the_dataset(build: Callable[..., Datasets]) -> None:
    train = build(seq_length=100_000, num_samples_train=2).train
    assert tokens_of(train).shape[1] == 100_000


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_the_global_batch_is_the_same_for_any_data_parallel_size(
    build: Callable[..., Datasets], size: int
) -> None:
    global_batch, micro = 24, 2
    train = build().train
    expected = tokens_of(train)[:48].reshape(2, global_batch, T)
    steps = global_batch // (micro * size)
    iterators = [
        batches(train, micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=size)
        for rank in range(size)
    ]
    for global_samples in expected:
        own = [torch.cat([b["tokens"] for b in islice(it, steps)]) for it in iterators]
        assert sorted(torch.cat(own).tolist()) == sorted(global_samples.tolist())


def test_start_sample_skips_the_samples_before_it(build: Callable[..., Datasets]) -> None:
    train = build().train
    assert torch.equal(tokens_of(train, start_sample=7), tokens_of(train)[7:])
    assert (
        list(
            batches(
                train,
                micro_batch_size=1,
                data_parallel_rank=0,
                data_parallel_size=1,
                start_sample=len(train),
            )
        )
        == []
    )


def test_all_ranks_end_together(build: Callable[..., Datasets]) -> None:
    train = build().train
    counts = {
        sum(
            1
            for _ in batches(train, micro_batch_size=5, data_parallel_rank=r, data_parallel_size=3)
        )
        for r in range(3)
    }
    assert counts == {len(train) // 15}


def test_a_dataset_that_is_replaced_in_place_gets_a_new_index(
    build: Callable[..., Datasets], tmp_path: Path
) -> None:
    for text in ("a" * 500, "b" * 900):
        write_binary([Document("1", text, "test")], tmp_path / "own", ByteTokenizer())
        train = build(tmp_path / "own", num_samples_train=4, split="1").train
        assert set(tokens_of(train).flatten().tolist()) <= {ord(text[0]), 256}


def test_a_multimodal_pair_gives_the_samples_of_a_plain_one(
    build: Callable[..., Datasets], tmp_path: Path
) -> None:
    def samples(name: str, ids: list[int], modes: list[int] | None) -> Tensor:
        is_multimodal = modes is not None
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), np.int16, is_multimodal)
        builder.add_document(ids, [150, 51], modes)
        builder.finalize(str(tmp_path / f"{name}.idx"))
        return tokens_of(build(tmp_path / name, split="1").train)

    ids = [*range(200), 256]
    assert samples("multimodal", ids, [0, 1]).equal(samples("plain", ids, None))
    with pytest.raises(DataError, match=r"a\.bin has id -1, but the tokenizer has 257 ids: set"):
        samples("a", [*range(200), -1], None)


def test_a_longer_run_begins_with_the_samples_of_a_shorter_one(
    build: Callable[..., Datasets],
) -> None:
    lengths = (1, N, 700, 2000)  # an epoch has some 540 samples
    runs = [tokens_of(build(num_samples_train=length).train) for length in lengths]
    for tokens, length in zip(runs, lengths, strict=True):
        assert len(tokens) >= length
        assert torch.equal(runs[-1][: len(tokens)], tokens)


def test_an_epoch_has_every_token_once_and_the_next_another_order(
    build: Callable[..., Datasets], prefix: Path
) -> None:
    card = read_card(prefix)
    assert card is not None
    per_epoch = -(-card.num_tokens[0] // T)
    two = tokens_of(build(num_samples_train=2 * per_epoch - 1).train)
    first, second = two[:per_epoch], two[per_epoch:]
    pair = open_pair(prefix)
    whole = torch.from_numpy(pair.bin_reader.read(np.uint16, card.num_tokens[0], 0).astype(int))
    # The last sample of an epoch extends into the next.
    surplus = per_epoch * T - card.num_tokens[0]
    counted = torch.bincount(first.flatten(), minlength=257)
    assert (counted - torch.bincount(whole, minlength=257)).clamp(min=0).sum() <= surplus
    assert not torch.equal(first[:8], second[:8])


def test_the_card_assigns_documents_to_training_and_validation(
    build: Callable[..., Datasets], prefix: Path
) -> None:
    data = build(num_samples_valid=20, num_samples_train=600)
    pair = open_pair(prefix)
    card = read_card(prefix)
    assert card is not None
    assert data.valid is not None
    texts = [text_of(pair[i].tolist()) for i in range(len(pair))]
    for part, own in (
        (data.train, slice(0, card.num_documents[0])),
        (data.valid, slice(card.num_documents[0], None)),
    ):
        inside = [text for text in texts[own] if len(text.encode()) > T]
        whole = [row for row in tokens_of(part).tolist() if 256 not in row]
        assert whole
        for row in whole:
            text = text_of(row).strip("\ufffd")
            assert any(text in document for document in inside)


@pytest.fixture
def letters(tmp_path: Path) -> dict[Path, float]:
    """Two pairs, one of the letter a and one of b, with weights."""
    for letter in "ab":
        documents = [Document(str(i), letter * 500, "test") for i in range(20)]
        write_binary(documents, tmp_path / letter, ByteTokenizer())
    return {tmp_path / "a": 3.0, tmp_path / "b": 1.0}


def test_a_blend_takes_from_each_pair_by_weight(
    build: Callable[..., Datasets], letters: dict[Path, float]
) -> None:
    rows = tokens_of(build(letters, num_samples_train=400, split="1").train)
    assert len(rows) == 400
    from_b = (rows == ord("b")).any(dim=1)
    assert int(from_b.sum()) == 100
    # The next sample comes from the pair furthest behind, so the shares never deviate by more than one sample.
    shares = from_b.cumsum(0) - torch.arange(1, 401) / 4
    assert shares.abs().max() <= 1


def test_a_blends_validation_samples_come_from_other_documents(
    build: Callable[..., Datasets], tmp_path: Path
) -> None:
    for letters in ("ab", "cd"):
        documents = [Document(str(i), letters[i // 10] * 500, "test") for i in range(20)]
        write_binary(documents, tmp_path / letters, ByteTokenizer())
    both = {tmp_path / "ab": 0.5, tmp_path / "cd": 0.5}
    data = build(both, num_samples_train=40, num_samples_valid=20, split="1,1")
    assert data.valid is not None
    for samples, own in ((data.train, "ac"), (data.valid, "bd")):
        assert set(tokens_of(samples).flatten().tolist()) == {*map(ord, own), 256}


def test_a_longer_blend_begins_with_the_samples_of_a_shorter_one(
    build: Callable[..., Datasets], letters: dict[Path, float], prefix: Path, plain: Path
) -> None:
    short, long = (
        tokens_of(
            build({prefix: 0.7, plain: 0.2, next(iter(letters)): 0.1}, num_samples_train=n).train
        )
        for n in (50, 900)
    )
    assert 50 <= len(short) < 60
    assert torch.equal(long[: len(short)], short)


def test_masked_documents_do_not_see_each_other(build: Callable[..., Datasets]) -> None:
    train = build(mask_documents=True, mask_eod_loss=True).train
    batch = next(batches(train, micro_batch_size=30, data_parallel_rank=0, data_parallel_size=1))
    assert batch["attention_mask"].shape == (30, 1, T, T)
    document = (batch["tokens"] == 256).cumsum(1) - (batch["tokens"] == 256).long()
    assert document.max() >= 1
    same = document[:, :, None] == document[:, None, :]
    causal = torch.ones(T, T).tril().bool()
    assert torch.equal(batch["attention_mask"][:, 0], ~(same & causal))
    assert torch.equal(batch["loss_mask"], (batch["tokens"] != 256).float())


BUILD = f"""
from pathlib import Path
import hashlib, torch
from quantexp.training.megatron.data_loader import batches, build_datasets
from quantexp.data.tokenizers.load import ByteTokenizer

def work(prefix, cache, rank=None, store=None):
    if rank is not None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{{store}}", rank=int(rank), world_size=2
        )
    data = build_datasets(
        Path(prefix), ByteTokenizer(), seq_length={T}, seed=1, num_samples_train={N}, cache_dir=Path(cache)
    )
    single = {{"micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 1}}
    tokens = torch.cat([batch["tokens"] for batch in batches(data.train, **single)])
    if rank is not None:
        torch.distributed.destroy_process_group()
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
"""


@pytest.mark.slow
def test_four_runs_at_once_share_one_index(prefix: Path, tmp_path: Path) -> None:
    caches = [tmp_path / str(attempt) for attempt in range(5)]
    rounds = side_by_side(BUILD, [[[prefix, cache]] * 4 for cache in caches])
    for cache, hashes in zip(caches, rounds, strict=True):
        assert len(set(hashes)) == 1
        assert sorted(path.name[:6] for path in cache.iterdir()) == ["hashes", "index-"]


@pytest.mark.slow
def test_two_ranks_of_one_run_see_the_same_samples(prefix: Path, tmp_path: Path) -> None:
    together = [[prefix, tmp_path / "together", rank, tmp_path / "store"] for rank in range(2)]
    alone = [[prefix, tmp_path / f"alone{i}"] for i in range(2)]
    (first, second), (own, _) = side_by_side(BUILD, [together, alone])
    assert first == second == own


@pytest.mark.parametrize("number", [4, 4000])
def test_held_out_samples_that_count_more_than_once_are_logged(
    prefix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    experiment = compose(
        [
            "training=fast",
            "evaluation.every=1",
            f"evaluation.samples={number}",
            f"paths.cache={tmp_path}",
        ],
        None,
        {},
    )
    with caplog.at_level("WARNING", LOG.name):
        given = rank_batches(experiment, Rank(), {prefix: 1.0}, ByteTokenizer())
    assert sum(len(batch["tokens"]) for batch in given.held_out()) == number
    words = f"more than once: evaluation.samples={number} needs {number} held-out samples of {prefix}, which has "
    assert (words in caplog.text) == (number > 4)
