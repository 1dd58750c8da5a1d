"""`tokens.jsonl`: sample indices and token ids of each captured micro-batch, so that a value leads back to its token.

A line holds an iteration's micro-batch of one data-parallel rank, and the text of each of its distinct ids. Ranks write
lists of their own, which are joined with the others. `quantexp.capture.samples` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from quantexp.capture.store.manifest import TOKENS, TokenLine, part_of
from quantexp.errors import CaptureError


class TokenList:
    """Appends to the list of one rank."""

    def __init__(self, folder: Path, rank: int, text_of: Callable[[int], str]) -> None:
        self._file, self._text_of = part_of(folder / TOKENS, rank), text_of

    def add(
        self,
        iteration: int,
        micro_batch: int,
        data_rank: int,
        samples: list[int],
        tokens: list[list[int]],
    ) -> None:
        """Add the tokens of a micro-batch.

        Raises:
            CaptureError: the list cannot be written.
        """
        distinct = sorted({token for sample in tokens for token in sample})
        line: TokenLine = {
            "iteration": iteration,
            "micro_batch": micro_batch,
            "data_rank": data_rank,
            "samples": samples,
            "tokens": tokens,
            "texts": {str(token): self._text_of(token) for token in distinct},
        }
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise CaptureError(
                f"{self._file} cannot be written: {error.strerror or error}"
            ) from error
