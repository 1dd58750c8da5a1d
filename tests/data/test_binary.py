import os
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from quantexp.data import binary
from quantexp.data.binary import check_pair, fingerprint, folder_beside, pair_paths
from quantexp.data.sources import Document
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import DataError
from quantexp.training.megatron.sample_order import open_pair
from tests.data.pairs import write_binary


class WideTokenizer(ByteTokenizer):
    """Byte ids in a vocabulary too large for uint16."""

    vocab_size = 65_500


def documents(*texts: str) -> list[Document]:
    return [Document(str(i), text, "test") for i, text in enumerate(texts)]


def write(prefix: Path, *texts: str) -> Path:
    write_binary(documents(*texts), prefix, ByteTokenizer())
    return prefix


@pytest.mark.parametrize(
    ("tokenizer", "dtype"), [(ByteTokenizer(), np.uint16), (WideTokenizer(), np.int32)]
)
def test_megatrons_reader_finds_every_document_with_its_end(
    tmp_path: Path, tokenizer: ByteTokenizer, dtype: type
) -> None:
    texts = ("one", "zwölf", "")
    write_binary(documents(*texts), tmp_path / "v1.2", tokenizer)
    read = IndexedDataset(str(tmp_path / "v1.2"))
    assert [list(read[i]) for i in range(len(read))] == [[*t.encode(), 256] for t in texts]
    assert list(read.document_indices) == [0, 1, 2, 3]
    assert read.index.dtype is dtype
    bin_path, _ = pair_paths(tmp_path / "v1.2")
    assert bin_path.stat().st_size == (3 + 6 + 3) * np.dtype(dtype).itemsize


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64], ids=lambda t: t.__name__
)
@pytest.mark.parametrize("multimodal", [False, True])
def test_pairs_that_megatron_builds_are_opened(
    tmp_path: Path, dtype: type[np.number], multimodal: bool
) -> None:
    contents = [[[1, 2], [3]], [[4, 5, 6]]]
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype, multimodal=multimodal)
    for document in contents:
        ids = [each for sequence in document for each in sequence]
        modes = [1] * len(document) if multimodal else None
        builder.add_document(ids, [len(sequence) for sequence in document], modes)
    builder.finalize(str(tmp_path / "a.idx"))
    pair = open_pair(tmp_path / "a")
    assert [pair[i].tolist() for i in range(3)] == [[1, 2], [3], [4, 5, 6]]
    assert pair.document_indices.tolist() == [0, 2, 3]
    content = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(content + b"x")
    with pytest.raises(DataError, match=r"a\.idx: damaged: ids of type"):
        open_pair(tmp_path / "a")


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match=r"cannot write .*file/a: .*; give another folder"),
        folder_beside(tmp_path / "file" / "a"),
    ):
        pass


@pytest.mark.parametrize("missing", [".bin", ".idx"])
@pytest.mark.parametrize("use", [fingerprint, check_pair, open_pair])
def test_a_missing_file_is_refused_naming_both(tmp_path: Path, missing: str, use: object) -> None:
    prefix = write(tmp_path / "a", "x")
    Path(f"{prefix}{missing}").unlink()
    with pytest.raises(DataError, match=r"expected .*/a\.bin and .*/a\.idx; .*quantexp prepare"):
        use(prefix)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("data/wikipedi", "did you mean {}/data/wikipedia?"),
        ("dat/wikipedia", "did you mean {}/data/wikipedia?"),
        ("data/wikipedia.bin", "did you mean {}/data/wikipedia?"),
        ("data", "did you mean {0}/data/dolma or {0}/data/wikipedia?"),
        ("a.jsonl", "raw text is converted by `quantexp prepare dataset.source={0}/a.jsonl` with "),
        ("b, c.jsonl", """quantexp prepare 'dataset.source='"'"'{0}/b, c.jsonl'"'"''` with"""),
        ("raw", "dataset.tokenizer=byte, which needs nothing; else give another dataset.path"),
        (
            "data/books",
            "data/books.idx; write them with `quantexp prepare` (dataset.tokenizer=byte needs no",
        ),
        ("nope/dolma", "there is no folder {}/nope; write them with `quantexp prepare`"),
        ("data/half", "{}/data/half.partial is an unfinished preparation: run its `quantexp"),
    ],
)
def test_a_wrong_path_is_refused_with_what_was_perhaps_meant(
    tmp_path: Path, path: str, words: str
) -> None:
    for name in ("wikipedia", "dolma"):
        write(tmp_path / "data" / name, "x")
    (tmp_path / "raw").mkdir()
    (tmp_path / "data" / "half.partial").mkdir()
    for name in ("a.jsonl", "b, c.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError) as error:
        check_pair(tmp_path / path)
    assert words.format(tmp_path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not an index at all", b"MMIDIDX\x00\x00" + b"\x01"])
def test_a_file_that_is_no_index_is_refused(tmp_path: Path, content: bytes) -> None:
    prefix = write(tmp_path / "a", "x")
    pair_paths(prefix)[1].write_bytes(content)
    with pytest.raises(DataError, match=r"a\.idx: not a Megatron index"):
        open_pair(prefix)


@pytest.mark.parametrize("size", [34, 60])
def test_a_cut_index_is_refused(tmp_path: Path, size: int) -> None:
    prefix = write(tmp_path / "a", "x")
    os.truncate(pair_paths(prefix)[1], size)
    with pytest.raises(DataError, match=r"a\.idx: cut short: copy or prepare"):
        open_pair(prefix)


def test_an_empty_bin_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", "x")
    os.truncate(pair_paths(prefix)[0], 0)
    with pytest.raises(DataError, match=r"a\.bin is empty: copy or prepare"):
        open_pair(prefix)


def test_a_cut_bin_is_refused_with_both_sizes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", "four")
    os.truncate(pair_paths(prefix)[0], 8)
    with pytest.raises(DataError, match=r"a\.bin has 8 bytes where .*a\.idx says 10: copy"):
        open_pair(prefix)


def test_the_fingerprint_follows_content_and_not_the_path(tmp_path: Path) -> None:
    first = fingerprint(write(tmp_path / "a", "x", "y"))
    assert fingerprint(write(tmp_path / "b", "x", "y")) == first
    others = [("x", "z"), ("y", "x"), ("xy",), ("x", "y", "")]
    prints = {fingerprint(write(tmp_path / "c", *texts)) for texts in others}
    assert len(prints | {first}) == 5


def test_a_large_bin_is_sampled_at_its_first_and_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary, "_MIB", 16)
    monkeypatch.setattr(binary, "_WHOLE_BYTES", 1024)
    prefix = write(tmp_path / "a", "x" * 5000)
    path = pair_paths(prefix)[0]
    content = path.read_bytes()

    def print_with(position: int) -> str:
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        return fingerprint(prefix)

    first = fingerprint(prefix)
    assert print_with(0) != first
    assert print_with(len(content) - 1) != first
    assert print_with(16) == first
    path.write_bytes(content + b"xx")
    assert fingerprint(prefix) != first


def test_a_bin_of_exactly_the_limit_is_read_in_pieces_that_cover_it(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.touch()
    os.truncate(path, 64 << 20)
    assert list(binary._bin_offsets(path)) == [i << 20 for i in range(64)]
