"""The interface of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """The interface that the data path needs."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, `eod` included."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """The values that Megatron hashes to name its cached indices."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files it was read from; copies of them give the same tokenizer."""

    def tokenize(self, text: str) -> list[int]:
        """Returns the text's ids, without `eod`."""

    def tokenize_all(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Returns the ids of each text as `tokenize` does, in one call, which is faster."""

    def detokenize(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids; `eod` has none."""

    def fingerprint(self) -> str:
        """Returns the sha256, in hex, of everything that determines the ids."""


def identifiers(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the values that Megatron hashes to name its cached indices."""
    return {"class": type(tokenizer).__name__, "fingerprint": tokenizer.fingerprint()}
