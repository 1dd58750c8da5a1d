"""The interface of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """What the data path asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, `eod` included."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What Megatron hashes to name its cached indices."""

    @property
    def files(self) -> tuple[Path, ...]:
        """What it was read from; a copy of these is the same tokenizer."""

    def tokenize(self, text: str) -> list[int]:
        """Returns the text's ids, without `eod`."""

    def tokenize_all(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Returns the ids of each text as `tokenize` does, in one call, which is faster."""

    def detokenize(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids; `eod` has none."""

    def fingerprint(self) -> str:
        """Returns the sha256, in hex, of what decides the ids."""


def identifiers(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns what Megatron hashes to name its cached indices."""
    return {"class": type(tokenizer).__name__, "fingerprint": tokenizer.fingerprint()}
