"""Completes a dataset's configuration: tokenizer and split from its card, and its label."""

from pathlib import Path

from quantexp.data.binary import pair_paths
from quantexp.data.prepared import card_path, default_prefix, read_card, tokenizer_folder
from quantexp.data.tokenizers.load import load_tokenizer
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.folders import user_path
from quantexp.schema.dataset import DEFAULT_SPLIT, DatasetConfig, TokenizerKind


def complete(dataset: DatasetConfig) -> None:
    """Sets path, tokenizer, split and label of a dataset that is not the built-in sample.

    One without a path or a blend has the path of what `prepare` wrote, if there is anything.
    Tokenizer and split come from the card beside the first path, else they are the defaults.

    Raises:
        DataError: the card cannot be read.
    """
    default = Path(default_prefix(dataset.name))
    written = (card_path(default), *pair_paths(default))
    if not (dataset.path or dataset.blend) and any(p.exists() for p in written):
        dataset.path = str(default)
    prefix = next(iter(paths(dataset)), None)
    card = read_card(prefix) if prefix is not None else None
    if card is not None and dataset.tokenizer is None and dataset.tokenizer_path is None:
        assert prefix is not None
        dataset.tokenizer = TokenizerKind(card.tokenizer.kind)
        if card.tokenizer.file is not None:
            dataset.tokenizer_path = str(tokenizer_folder(prefix) / card.tokenizer.file)
        dataset.eod = dataset.eod or card.tokenizer.eod_name
        dataset.tokenizer_pattern = dataset.tokenizer_pattern or card.tokenizer.pattern
    dataset.tokenizer = dataset.tokenizer or TokenizerKind.huggingface
    if dataset.split is None:
        dataset.split = DEFAULT_SPLIT if card is None else card.split
    dataset.label = dataset.name


def paths(dataset: DatasetConfig) -> dict[Path, float]:
    """Returns the prefixes of a dataset with their weights; empty for the sample."""
    if dataset.path is not None:
        return {user_path(dataset.path): 1.0}
    return {user_path(path): weight for path, weight in (dataset.blend or {}).items()}


def tokenizer_of(dataset: DatasetConfig) -> Tokenizer:
    """Returns the tokenizer of a completed configuration.

    Raises:
        DataError: it cannot be read.
    """
    assert dataset.tokenizer is not None
    return load_tokenizer(
        dataset.tokenizer.value,
        dataset.tokenizer_path,
        eod=dataset.eod,
        pattern=dataset.tokenizer_pattern,
    )
