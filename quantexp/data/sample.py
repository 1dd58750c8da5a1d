"""The built-in samples: some 40 kB of text each, so that everything runs before data is prepared.

`sample/wikipedia.xml` has the form of a MediaWiki export, `sample/dolma.jsonl` that of Dolma.
Both were written for this project. They are tokenised by bytes and cached as a .bin/.idx pair.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from quantexp.data.binary import folder_beside, pair_paths, write_binary
from quantexp.data.sources import Document, read_dolma, read_wikipedia
from quantexp.data.tokenizer import ByteTokenizer
from quantexp.errors import DataError

_SAMPLES: dict[str, tuple[str, Callable[[Path], Iterator[Document]]]] = {
    "wikipedia": ("wikipedia.xml", read_wikipedia),
    "dolma": ("dolma.jsonl", read_dolma),
}


def read_sample(dataset_name: str) -> Iterator[Document]:
    """Returns the documents of a built-in sample, through the reader that real data takes.

    Raises:
        DataError: there is no sample of that name.
    """
    if dataset_name not in _SAMPLES:
        raise DataError(
            f"no built-in sample for dataset {dataset_name}, only for {', '.join(_SAMPLES)}; "
            "give dataset.path"
        )
    file, read = _SAMPLES[dataset_name]
    return read(Path(__file__).parent / "sample" / file)


def sample_fingerprint(dataset_name: str) -> str:
    """Returns what stands for the sample's tokens in a run's identity.

    Raises:
        DataError: there is no sample of that name.
    """
    return f"sample-{_content_hash(list(read_sample(dataset_name)), ByteTokenizer())}"


def sample_prefix(dataset_name: str, cache_dir: Path) -> Path:
    """Returns the prefix of the sample's .bin/.idx pair in `cache_dir`, written if missing.

    The name ends in a hash of the documents and of the tokenizer, so that another version of
    either is another pair. Processes that start at the same time each write a pair of their own
    and rename it over the others', which are equal byte for byte; whoever has opened one keeps
    what it opened.

    Raises:
        DataError: there is no sample of that name, or `cache_dir` cannot be written.
    """
    documents = list(read_sample(dataset_name))
    tokenizer = ByteTokenizer()
    prefix = cache_dir / f"{dataset_name}-sample-{_content_hash(documents, tokenizer)}"
    if not all(path.is_file() for path in pair_paths(prefix)):
        _write(documents, prefix, tokenizer)
    return prefix


def _write(documents: list[Document], prefix: Path, tokenizer: ByteTokenizer) -> None:
    """Writes the pair without ever taking an equal one away, as replacing a dataset would."""
    with folder_beside(prefix) as folder:
        own = folder / "sample"
        write_binary(documents, own, tokenizer)
        for written, path in zip(pair_paths(own), pair_paths(prefix), strict=True):
            written.replace(path)


def _content_hash(documents: list[Document], tokenizer: ByteTokenizer) -> str:
    """Returns 12 hex digits that stand for the ids in the pair and their order."""
    digest = hashlib.sha256(tokenizer.fingerprint().encode())
    for document in documents:
        digest.update(hashlib.sha256(document.text.encode("utf-8")).digest())
    return digest.hexdigest()[:12]
