import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from quantexp.data import binary
from quantexp.data.binary import check_pair, fingerprint, pair_paths, write_binary
from quantexp.data.sources import Document
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import DataError
from quantexp.training.megatron.pairs import open_pair


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
    report = write_binary(documents(*texts), tmp_path / "v1.2", tokenizer)
    read = IndexedDataset(str(tmp_path / "v1.2"))
    assert [list(read[i]) for i in range(len(read))] == [[*t.encode(), 256] for t in texts]
    assert list(read.document_indices) == [0, 1, 2, 3]
    assert read.index.dtype is dtype
    assert (report.num_documents, report.num_tokens) == (3, 3 + 6 + 3)
    files = pair_paths(tmp_path / "v1.2")
    assert report.num_bytes == sum(path.stat().st_size for path in files)
    assert files[0].stat().st_size == report.num_tokens * np.dtype(dtype).itemsize
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_a_failing_source_leaves_no_file_and_the_old_pair(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", "old")
    before = fingerprint(prefix)

    def failing() -> Iterator[Document]:
        yield from documents("new")
        raise DataError("line 2")

    with pytest.raises(DataError, match="line 2"):
        write_binary(failing(), prefix, ByteTokenizer())
    assert fingerprint(prefix) == before
    assert sorted(tmp_path.iterdir()) == sorted(pair_paths(prefix))


def test_a_pair_is_replaced_and_folders_are_created(tmp_path: Path) -> None:
    prefix = write(tmp_path / "new" / "a", "old")
    write(prefix, "newer")
    pair = open_pair(prefix)
    assert bytes(pair[0][:-1].astype(np.uint8)) == b"newer"


def test_a_source_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no document to write to .*a\.bin: the source holds no"):
        write(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/a: .*; give another folder"):
        write(tmp_path / "file" / "a", "x")


@pytest.mark.parametrize("missing", [".bin", ".idx"])
@pytest.mark.parametrize("use", [fingerprint, check_pair, open_pair])
def test_a_missing_file_is_refused_naming_both(tmp_path: Path, missing: str, use: object) -> None:
    prefix = write(tmp_path / "a", "x")
    Path(f"{prefix}{missing}").unlink()
    with pytest.raises(DataError, match=r"expected .*/a\.bin and .*/a\.idx; .*quantexp prepare"):
        use(prefix)  # type: ignore[operator]


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
