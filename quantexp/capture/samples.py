"""Reads `tokens.jsonl`, the samples and tokens of captured micro-batches, see `quantexp.capture.store.token_list`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantexp.capture.lines import lists_of
from quantexp.capture.store.manifest import TOKENS, TokenLine
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


def samples_of(folder: Path) -> dict[tuple[int, int, int], list[Sample]]:
    """(iteration, micro-batch, data-parallel rank) -> its samples; empty for a capture without the list."""
    return {
        (line["iteration"], line["micro_batch"], line["data_rank"]): [
            Sample(index, ids, line["texts"])
            for index, ids in zip(line["samples"], line["tokens"], strict=False)
        ]
        for file in lists_of(folder, TOKENS)
        for line in json_files.json_lines(file, TokenLine, lambda error: None)
        if TokenLine.__annotations__.keys() <= line.keys()
    }
