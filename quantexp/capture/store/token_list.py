"""`tokens.jsonl`: sample indices and token ids of each captured micro-batch, so that a value leads back to its token.

A line holds an iteration's micro-batch of one data-parallel rank, and the text of each of its distinct ids. Ranks write
lists of their own, which are joined with the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quantexp.capture.store.manifest import TOKENS, TokenLine, part_of
from quantexp.errors import CaptureError
from quantexp.reading import json_files


@dataclass(frozen=True)
class Sample:
    """One sample of a captured micro-batch."""

    index: int
    ids: list[int]
    texts: dict[str, str]

    def text(self, position: int) -> str:
        """The text of the token at a position."""
        return self.texts.get(str(self.ids[position]), "")


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


def samples_of(folder: Path) -> dict[tuple[int, int, int], list[Sample]]:
    """(iteration, micro-batch, data-parallel rank) -> its samples; empty for a capture without the list."""
    lists = [folder / TOKENS, *sorted(folder.glob(f"{Path(TOKENS).stem}.rank*.jsonl"))]
    return {
        (line["iteration"], line["micro_batch"], line["data_rank"]): [
            Sample(index, ids, line["texts"])
            for index, ids in zip(line["samples"], line["tokens"], strict=False)
        ]
        for file in lists
        for line in _lines(file)
        if TokenLine.__annotations__.keys() <= line.keys()
    }


def _lines(file: Path) -> Iterator[TokenLine]:
    """The lines that can be read."""
    yield from json_files.json_lines(file, TokenLine, lambda error: None)
