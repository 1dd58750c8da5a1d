"""Writes documents as a pair in Megatron's form, as `quantexp prepare` would, and reads the ids of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from quantexp.data.binary import pair_paths
from quantexp.data.index import id_type, write_index
from quantexp.data.sources import Document
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.data.tokenizers.protocol import Tokenizer


def write_binary(documents: Iterable[Document], prefix: Path, tokenizer: Tokenizer) -> None:
    """Write `.bin` and `.idx`, with `eod` after each document."""
    bin_path, idx_path = pair_paths(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    dtype = id_type(tokenizer.vocab_size)
    ids = [[*tokenizer.tokenize(document.text), tokenizer.eod] for document in documents]
    bin_path.write_bytes(b"".join(np.array(each, dtype).tobytes() for each in ids))
    lengths = bin_path.with_suffix(".lengths")
    lengths.write_bytes(np.array([len(each) for each in ids], "<i4").tobytes())
    write_index(idx_path, [lengths], dtype)
    lengths.unlink()


def text_of(ids: Iterable[int]) -> str:
    """The text of `ByteTokenizer`'s ids, without the ends of documents; a window may cut a character in two."""
    return bytes(i for i in ids if i != ByteTokenizer.eod).decode("utf-8", errors="replace")
