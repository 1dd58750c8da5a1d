"""The card of a prepared dataset: `PREFIX.json`, beside `PREFIX.bin` and `PREFIX.idx`.

It says what the pair was made from and with which tokenizer (a copy lies in `PREFIX.tokenizer/`), how
many of its documents, in their order, are for training, validation and test, and what the
report showed. It is written last: a pair prepared here is whole when its card is there. A pair
without a card is Megatron's own and is used as it is. Imports neither numpy nor torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantexp.data.binary import pair_paths
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError

#: Raised whenever older cards cannot be read any more.
CARD_VERSION = 1


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that the ids are of."""

    kind: str
    vocab_size: int
    eod: int
    #: The sha256 of what decides its ids.
    fingerprint: str
    #: The name of its file in `PREFIX.tokenizer/`; None for bytes.
    file: str | None
    #: What was asked for beside the file.
    eod_name: str | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class Card:
    """What a prepared dataset is."""

    version: int
    dataset: str
    #: The hash of what was prepared and how.
    job: str
    tokenizer: TokenizerRecord
    #: As configured: the weights of training, validation and test.
    split: str
    #: Of training, validation and test.
    num_documents: tuple[int, int, int]
    num_tokens: tuple[int, int, int]
    #: Of `.bin` and of `.idx`.
    num_bytes: tuple[int, int]
    #: What was counted on the way.
    report: dict[str, Any]

    def parts(self) -> list[tuple[float, float] | None]:
        """Where training, validation and test lie in the pair, from 0 to 1; None for an empty one."""
        total, begin, found = sum(self.num_documents), 0, list[tuple[float, float] | None]()
        for number in self.num_documents:
            found.append((begin / total, (begin + number) / total) if number else None)
            begin += number
        return found


def card_path(prefix: Path) -> Path:
    """Returns where the card of a prefix lies."""
    return Path(f"{prefix}.json")


def tokenizer_folder(prefix: Path) -> Path:
    """Returns where the copy of the tokenizer lies."""
    return Path(f"{prefix}.tokenizer")


def read_card(prefix: Path) -> Card | None:
    """Returns the card, or None for a pair that was not prepared here.

    Raises:
        DataError: there is a card and it cannot be read, or is of another version.
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
    """Returns the card as it is written."""
    return asdict(card)


def read_whole(prefix: Path, tokenizer: Tokenizer) -> Card | None:
    """Returns the card of a pair that is whole and of this tokenizer, or None for one without a card.

    Raises:
        DataError: it has a card, and the pair or the tokenizer is another.
    """
    card = read_card(prefix)
    if card is None:
        return None
    for path, size in zip(pair_paths(prefix), card.num_bytes, strict=True):
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            raise DataError(
                f"{path} has {found:,} bytes where {card_path(prefix)} says {size:,}: copy or prepare "
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
    """Makes sure that a prepared pair was dealt as a run is configured.

    Raises:
        DataError: it was not.
    """
    if split != card.split:
        raise DataError(
            f"{prefix} was prepared with dataset.split={card.split}, got {split}; drop dataset.split, or "
            "prepare the dataset again"
        )
