"""Configuration of a dataset: what a run reads, and how `quantexp prepare` creates it from raw text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quantexp.schema.limits import FOLDER_NAME, MISSING, at_most, between, limited

#: The default shares of training, validation and test.
DEFAULT_SPLIT = "95,5,0"
#: The dataset whose sample is generated.
SYNTHETIC = "synthetic"


class TokenizerKind(Enum):
    """The tokenizer's implementation."""

    byte = "byte"
    huggingface = "huggingface"
    tiktoken = "tiktoken"
    sentencepiece = "sentencepiece"


@dataclass
class PrepareConfig:
    """How `quantexp prepare` filters and processes raw text; no key of this section affects a training run."""

    #: Sources of Dolma to keep (its `source` field), with the share of their documents, in (0, 1]; null keeps all.
    sources: Any = None
    #: Shorter documents are skipped, characters.
    min_chars: int = limited(1, *between(1, 1 << 40))
    #: Longer documents are skipped, characters; null means no limit.
    max_chars: int | None = limited(None, at_most(1 << 40))
    #: Keep only the first of documents with the same text.
    deduplicate: bool = False
    #: Unreadable records (no JSON, no UTF-8, no text) that are tolerated before the preparation fails.
    max_rejected: int = limited(100, *between(0, 1 << 40))
    #: Tokenising processes; null means one per core.
    num_workers: int | None = limited(None, *between(1, 65_536))


@dataclass
class DatasetConfig:
    """Where the tokens come from."""

    name: str = limited(MISSING, FOLDER_NAME)
    #: Prefix of a .bin/.idx pair, prepared here or by Megatron; takes precedence over the sample. null means
    #: data/NAME, where `quantexp prepare` writes.
    path: str | None = None
    #: Use the text that ships with quantexp (byte tokenizer) if no path is given.
    sample: bool = False
    #: Several prefixes instead of one path, each with its share of the samples: {PREFIX: 0.7, OTHER: 0.3}.
    blend: Any = None
    #: Raw text for `quantexp prepare`: a file, folder, pattern or hf:NAME of a Hugging Face dataset; or a list of such.
    source: Any = None
    #: null means the tokenizer that the data was prepared with, else huggingface.
    tokenizer: TokenizerKind | None = None
    #: Folder or tokenizer.json (huggingface), or model file; null means the copy beside prepared data.
    tokenizer_path: str | None = None
    #: Regular expression that splits the text for a tiktoken file; null selects it by the file's number of ranks.
    tokenizer_pattern: str | None = None
    #: Name of the token that ends a document; null means the tokenizer's own.
    eod: str | None = None
    #: Shares of train, validation and test documents; null means as prepared, else 95,5,0.
    split: str | None = None
    #: Whether tokens attend only within their own document; otherwise to all earlier tokens of the sample.
    mask_documents: bool = False
    #: Whether the prediction that follows the end of a document is excluded from the loss.
    mask_eod_loss: bool = False
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    #: The displayed name: the name, or the name and "(built-in sample)"; set by `load`.
    label: str | None = None
