"""The built-in data, so that everything works before any data is prepared.

`sample/wikipedia.xml` has the form of a MediaWiki export, `sample/dolma.jsonl` that of Dolma: some 40 kB of text each,
written for this project. `synthetic` is generated. They are prepared like real data (`prepare`), tokenised by bytes,
and cached.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from quantexp.data.binary import folder_beside, pair_paths
from quantexp.data.prepare.inputs import find_inputs
from quantexp.data.prepare.shards import read_shards, records
from quantexp.data.prepared import card_path
from quantexp.data.sources import Document
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import DataError
from quantexp.schema.dataset import (
    DEFAULT_SPLIT,
    SYNTHETIC,
    DatasetConfig,
    PrepareConfig,
    TokenizerKind,
)

#: Incremented whenever the generated documents change.
SYNTHETIC_VERSION = 1
_SAMPLES = {"wikipedia": "wikipedia.xml", "dolma": "dolma.jsonl"}


def read_sample(dataset_name: str) -> Iterator[Document]:
    """Yields the documents of a built-in sample, through the readers of real data.

    Raises:
        DataError: there is no sample with that name.
    """
    for item in find_inputs(str(_sample_file(dataset_name))):
        for shard in read_shards(item):
            for record in records(shard, dataset_name):
                if isinstance(record, Document):
                    yield record


def sample_fingerprint(dataset_name: str) -> str:
    """Returns the value that represents the sample's tokens in a run's identity.

    Raises:
        DataError: there is no sample with that name.
    """
    if dataset_name == SYNTHETIC:
        return f"{SYNTHETIC}-{SYNTHETIC_VERSION}"
    return f"sample-{_content_hash(list(read_sample(dataset_name)), ByteTokenizer())}"


def sample_prefix(dataset_name: str, cache_dir: Path, split: str = DEFAULT_SPLIT) -> Path:
    """Returns the prefix of the prepared sample in `cache_dir`; prepares it if missing.

    The name ends in a hash of the documents, the tokenizer and the split, so that another version of any of them has
    another name. Processes that start at the same time each write their own files and rename them over the others',
    which are byte-identical; a process that has opened one keeps its file.

    Raises:
        DataError: there is no sample with that name, or `cache_dir` cannot be written.
    """
    content = _content(dataset_name, split)
    prefix = cache_dir / f"{dataset_name}-sample-{content}"
    if not all(path.is_file() for path in _files(prefix)):
        _write(dataset_name, prefix, split)
    return prefix


def _write(dataset_name: str, prefix: Path, split: str) -> None:
    """Prepares the sample without ever removing an identical one, as replacing a dataset would."""
    from rich.console import Console

    from quantexp.data.prepare.job import make_job
    from quantexp.data.prepare.run import prepare

    with folder_beside(prefix) as folder:
        own = folder / "sample"
        config = DatasetConfig(
            name=dataset_name,
            path=str(own),
            source=str(_source(dataset_name, folder)),
            tokenizer=TokenizerKind.byte,
            split=split,
            prepare=PrepareConfig(max_rejected=0, num_workers=1),
        )
        prepare(make_job(config), Console(quiet=True))
        for written, path in zip(_files(own), _files(prefix), strict=True):
            written.replace(path)


def _files(prefix: Path) -> tuple[Path, ...]:
    return (*pair_paths(prefix), card_path(prefix))


def _source(dataset_name: str, folder: Path) -> Path:
    """The file of the documents, written to the folder if it is generated."""
    if dataset_name != SYNTHETIC:
        return _sample_file(dataset_name)
    from quantexp.data.synthetic import write_documents

    file = folder / "synthetic.jsonl"
    write_documents(file)
    return file


def _sample_file(dataset_name: str) -> Path:
    if dataset_name not in _SAMPLES:
        raise DataError(
            f"no built-in sample for dataset {dataset_name}, only for {', '.join([*_SAMPLES, SYNTHETIC])}; "
            "give dataset.path"
        )
    return Path(__file__).parent / "sample" / _SAMPLES[dataset_name]


def _content(dataset_name: str, split: str) -> str:
    if dataset_name == SYNTHETIC:
        text = f"{sample_fingerprint(SYNTHETIC)} {ByteTokenizer().fingerprint()} {split}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]
    return _content_hash(list(read_sample(dataset_name)), ByteTokenizer(), split)


def _content_hash(documents: list[Document], tokenizer: ByteTokenizer, split: str = "") -> str:
    """Returns 12 hex digits that represent the ids in the pair and their order."""
    digest = hashlib.sha256((tokenizer.fingerprint() + split).encode())
    for document in documents:
        digest.update(hashlib.sha256(document.text.encode("utf-8")).digest())
    return digest.hexdigest()[:12]
