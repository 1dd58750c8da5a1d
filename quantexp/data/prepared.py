"""The card of a prepared dataset: `PREFIX.json`, beside `PREFIX.bin` and `PREFIX.idx`.

It records the source of the pair, the tokenizer (with a copy in `PREFIX.tokenizer/`), how many documents, in order, are
for training, validation and test, and the report. The card is written last: a pair prepared here is complete when its
card exists. A pair without a card is Megatron's own and is used unchanged. Imports neither numpy nor torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantexp.data.binary import pair_paths
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError

#: Incremented whenever older cards become unreadable.
CARD_VERSION = 1


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer of the ids."""

    kind: str
    vocab_size: int
    eod: int
    #: The sha256 of everything that determines its ids.
    fingerprint: str
    #: The name of its file in `PREFIX.tokenizer/`; None for bytes.
    file: str | None
    #: Configured in addition to the file.
    eod_name: str | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class Card:
    """The description of a prepared dataset."""

    version: int
    dataset: str
    #: The hash of the preparation's input and configuration.
    job: str
    tokenizer: TokenizerRecord
    #: As configured: the shares of training, validation and test.
    split: str
    #: Of training, validation and test.
    num_documents: tuple[int, int, int]
    num_tokens: tuple[int, int, int]
    #: Of `.bin` and of `.idx`.
    num_bytes: tuple[int, int]
    #: The counts of the preparation.
    report: dict[str, Any]

    def parts(self) -> list[tuple[float, float] | None]:
        """The ranges of training, validation and test in the pair, from 0 to 1; None for an empty part."""
        total, begin, ranges = sum(self.num_documents), 0, list[tuple[float, float] | None]()
        for number in self.num_documents:
            ranges.append((begin / total, (begin + number) / total) if number else None)
            begin += number
        return ranges


def card_path(prefix: Path) -> Path:
    """Returns the path of a prefix's card."""
    return Path(f"{prefix}.json")


def tokenizer_folder(prefix: Path) -> Path:
    """Returns the folder with the copy of the tokenizer."""
    return Path(f"{prefix}.tokenizer")


def read_card(prefix: Path) -> Card | None:
    """Returns the card, or None for a pair that was not prepared here.

    Raises:
        DataError: the card cannot be read, or is of another version.
    """
    path = card_path(prefix)
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the dataset again") from error
    try:
        if content["version"] != CARD_VERSION:
            raise ValueError(f"version {content['version']}")
        for key in ("num_documents", "num_tokens", "num_bytes"):
            content[key] = tuple(content[key])
        return Card(**{**content, "tokenizer": TokenizerRecord(**content["tokenizer"])})
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: no card of this version of quantexp ({error}); prepare the dataset again"
        ) from error


def card_json(card: Card) -> dict[str, Any]:
    """Returns the card in its JSON form."""
    return asdict(card)


def read_whole(prefix: Path, tokenizer: Tokenizer) -> Card | None:
    """Returns the card of a complete pair with this tokenizer; None for a pair without a card.

    Raises:
        DataError: the pair or the tokenizer differs from the card.
    """
    card = read_card(prefix)
    if card is None:
        return None
    for path, size in zip(pair_paths(prefix), card.num_bytes, strict=True):
        num_bytes = path.stat().st_size if path.is_file() else 0
        if num_bytes != size:
            raise DataError(
                f"{path} has {num_bytes:,} bytes where {card_path(prefix)} says {size:,}: copy or prepare "
                "the dataset again"
            )
    if tokenizer.fingerprint() != card.tokenizer.fingerprint:
        raise DataError(
            f"{prefix} was prepared with another tokenizer ({card.tokenizer.kind}, "
            f"{card.tokenizer.vocab_size:,} ids, {card.tokenizer.fingerprint[:12]}) than the one given "
            f"({tokenizer.vocab_size:,} ids, {tokenizer.fingerprint()[:12]}): drop dataset.tokenizer "
            "and dataset.tokenizer_path to use its own, or prepare the dataset again"
        )
    return card


def check_split(prefix: Path, card: Card, split: str) -> None:
    """Requires that a prepared pair was split as the run is configured.

    Raises:
        DataError: the splits differ.
    """
    if split != card.split:
        raise DataError(
            f"{prefix} was prepared with dataset.split={card.split}, got {split}; drop dataset.split, or "
            "prepare the dataset again"
        )
