import socket
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.data import loader
from quantexp.data.binary import write_binary
from quantexp.data.loader import Datasets, batches, build_datasets
from quantexp.data.sample import read_sample, sample_prefix
from quantexp.data.sources import Document
from quantexp.data.tokenizer import ByteTokenizer
from quantexp.errors import DataError

from .side_by_side import side_by_side

T = 64
N = 48


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_prefix("wikipedia", tmp_path_factory.mktemp("sample"))


@pytest.fixture
def build(prefix: Path, tmp_path: Path) -> Callable[..., Datasets]:
    fixed: dict[str, Any] = {"seq_length": T, "seed": 1, "num_samples_train": N}

    def build(path: Path = prefix, **changes: Any) -> Datasets:
        arguments = fixed | {"cache_dir": tmp_path / "cache"} | changes
        return build_datasets(path, ByteTokenizer(), **arguments)

    return build


def tokens_of(data: loader.Samples, **arguments: Any) -> Tensor:
    single = {"micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 1}
    return torch.cat([batch["tokens"] for batch in batches(data, **single | arguments)])


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
        parts = [tokenizer.detokenize(p).strip("\ufffd") for p in _split(row, tokenizer.eod)]
        assert all(any(part in text for text in whole) for part in parts)


def _split(ids: list[int], at: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for i in ids:
        if i == at:
            parts.append([])
        else:
            parts[-1].append(i)
    return parts


def test_the_same_seed_gives_the_same_samples_from_another_cache(
    build: Callable[..., Datasets], tmp_path: Path
) -> None:
    first = tokens_of(build().train)
    assert torch.equal(tokens_of(build().train), first)
    assert torch.equal(tokens_of(build(cache_dir=tmp_path / "other").train), first)


def test_another_seed_gives_another_order(build: Callable[..., Datasets]) -> None:
    first, second = build().train, build(seed=2).train
    assert not torch.equal(tokens_of(first)[:8], tokens_of(second)[:8])


def test_validation_leaves_the_training_samples_as_they_are(
    build: Callable[..., Datasets],
) -> None:
    without, with_valid = build(), build(num_samples_valid=5)
    assert without.valid is None
    assert with_valid.valid is not None
    assert len(with_valid.valid) >= 5
    assert torch.equal(tokens_of(without.train), tokens_of(with_valid.train))


def test_more_samples_than_an_epoch_has_are_drawn_from_further_epochs(
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
    for wanted in expected:
        own = [torch.cat([b["tokens"] for b in islice(it, steps)]) for it in iterators]
        assert sorted(torch.cat(own).tolist()) == sorted(wanted.tolist())


def test_a_start_goes_on_where_the_samples_before_ended(build: Callable[..., Datasets]) -> None:
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


def test_a_missing_pair_is_refused(build: Callable[..., Datasets], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected .*none\.bin and .*none\.idx"):
        build(tmp_path / "none")


@pytest.mark.parametrize("split", ["", "a", "1,-1", "1;2", "0,0,0", "1,2,3,4", "nan"])
def test_a_split_that_is_no_list_of_weights_is_refused(
    build: Callable[..., Datasets], split: str
) -> None:
    with pytest.raises(DataError, match=rf"dataset\.split must be the weights .*, got {split}$"):
        build(split=split)


@pytest.mark.parametrize(
    ("split", "part"), [("0,1", "training"), ("999,1", "validation"), ("1", "validation")]
)
def test_a_split_that_leaves_a_wanted_part_empty_is_refused(
    build: Callable[..., Datasets], split: str, part: str
) -> None:
    words = rf"has 40 documents, of which dataset\.split={split} leaves none for {part}: give more"
    with pytest.raises(DataError, match=words):
        build(split=split, num_samples_valid=1)


def test_the_dataset_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    class Small(ByteTokenizer):
        vocab_size = 100

    write_binary([Document("1", "\x7f", "test")], tmp_path / "a", ByteTokenizer())
    with pytest.raises(DataError, match=r"a\.bin has id 256, but the tokenizer has 100 ids: set"):
        build_datasets(
            tmp_path / "a", Small(), seq_length=1, seed=1, num_samples_train=1, cache_dir=tmp_path
        )


def test_a_cache_that_cannot_be_written_is_refused(
    build: Callable[..., Datasets], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/index-"):
        build(cache_dir=tmp_path / "file")


def test_a_cache_that_another_host_cannot_see_is_refused(
    build: Callable[..., Datasets], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    with pytest.raises(DataError, match="this process cannot see it: give a cache folder that all"):
        build()


BUILD = f"""
from pathlib import Path
import hashlib, torch
from quantexp.data.loader import batches, build_datasets
from quantexp.data.tokenizer import ByteTokenizer

def work(prefix, cache, rank=None, port=None):
    if rank is not None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=int(rank), world_size=2
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


def test_four_runs_at_once_share_one_index(prefix: Path, tmp_path: Path) -> None:
    caches = [tmp_path / str(attempt) for attempt in range(5)]
    rounds = side_by_side(BUILD, [[[prefix, cache]] * 4 for cache in caches])
    for cache, found in zip(caches, rounds, strict=True):
        assert len(set(found)) == 1
        assert [path.name[:6] for path in cache.iterdir()] == ["index-"]


def test_two_ranks_of_one_run_see_the_same_samples(prefix: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = [[prefix, tmp_path, rank, port] for rank in range(2)]
    alone = [[prefix, tmp_path / f"alone{i}"] for i in range(2)]
    (first, second), (own, _) = side_by_side(BUILD, [together, alone])
    assert first == second == own
