import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from quantexp.data.binary import fingerprint
from quantexp.data.sample import read_sample, sample_prefix
from quantexp.errors import DataError
from tests.data.pairs import text_of

from .side_by_side import side_by_side

SAMPLES = ["wikipedia", "dolma"]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_some_forty_kilobytes_in_forty_documents(name: str) -> None:
    documents = list(read_sample(name))
    assert len(documents) == 40
    assert 35_000 < sum(len(document.text.encode()) for document in documents) < 45_000
    assert min(len(document.text) for document in documents) > 700


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_repeats_nothing(name: str) -> None:
    documents = list(read_sample(name))
    assert len({document.id for document in documents}) == 40
    assert len({document.title for document in documents}) == 40
    sentences = [s for d in documents for s in d.text.split(". ") if len(s) > 40]
    assert max(Counter(sentences).values()) == 1


def test_the_redirect_and_the_talk_page_are_in_the_file_and_left_out() -> None:
    file = Path(sys.modules["quantexp.data.sample"].__file__ or "").parent / "sample/wikipedia.xml"
    titles = {document.title for document in read_sample("wikipedia")}
    for title in ("Basaltic rock", "Talk:Silk"):
        assert f"<title>{title}</title>" in file.read_text()
        assert title not in titles
    assert {"Basalt", "Silk"} < titles


def test_no_markup_is_left_in_the_wikipedia_sample() -> None:
    text = "\n".join(document.text for document in read_sample("wikipedia"))
    for mark in ("[[", "]]", "{{", "}}", "''", "==", "{|", "|}", "<", ">", "Category:", "&amp;"):
        assert mark not in text


def test_the_dolma_sample_comes_from_several_sources() -> None:
    sources = Counter(document.source for document in read_sample("dolma"))
    assert len(sources) == 5
    assert min(sources.values()) >= 5


@pytest.mark.parametrize("name", SAMPLES)
def test_the_pair_contains_the_documents_and_is_written_once(name: str, tmp_path: Path) -> None:
    prefix = sample_prefix(name, tmp_path / "cache")
    pair = IndexedDataset(str(prefix))
    texts = [text_of(int(i) for i in pair[n]) for n in range(len(pair))]
    assert sorted(texts) == sorted(document.text for document in read_sample(name))
    times = {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()}
    assert len(times) == 3
    assert sample_prefix(name, tmp_path / "cache") == prefix
    assert {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()} == times


def test_half_a_pair_is_written_again(tmp_path: Path) -> None:
    prefix = sample_prefix("dolma", tmp_path)
    before = fingerprint(prefix)
    Path(f"{prefix}.bin").unlink()
    assert sample_prefix("dolma", tmp_path) == prefix
    assert fingerprint(prefix) == before


FINGERPRINT = """
from pathlib import Path
from quantexp.data.binary import fingerprint
from quantexp.data.sample import sample_prefix

def work(cache):
    prefix = sample_prefix("wikipedia", Path(cache))
    return prefix, fingerprint(prefix)
"""


def test_four_processes_at_once_agree(tmp_path: Path) -> None:
    caches = [tmp_path / str(attempt) for attempt in range(5)]
    for cache, fingerprints in zip(
        caches, side_by_side(FINGERPRINT, [[[cache]] * 4 for cache in caches]), strict=True
    ):
        assert len(set(fingerprints)) == 1
        assert len(list(cache.iterdir())) == 3


def test_a_dataset_without_a_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"for dataset c4, only for wikipedia, dolma, synthetic; "):
        sample_prefix("c4", tmp_path)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*dolma-sample-"):
        sample_prefix("dolma", tmp_path / "file")


def test_importing_the_light_modules_imports_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, quantexp.data, quantexp.data.sources, quantexp.data.tokenizers.load\n"
        "import quantexp.data.binary, quantexp.data.sample\n"
        "sys.exit(bool({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
