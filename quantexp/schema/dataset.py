"""The configuration of a dataset, typed: what a run reads, and how `quantexp prepare` makes it from raw text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quantexp.schema.missing import MISSING

#: The shares of training, validation and test where nothing else is said.
DEFAULT_SPLIT = "95,5,0"


class TokenizerKind(Enum):
    """What turns text into token ids."""

    byte = "byte"
    huggingface = "huggingface"
    tiktoken = "tiktoken"
    sentencepiece = "sentencepiece"


@dataclass
class PrepareConfig:
    """What `quantexp prepare` takes from the raw text, and how; nothing of it concerns a training run."""

    #: Sources of Dolma to keep (its `source` field), with the share of their documents, in (0, 1]; null is all of all.
    sources: Any = None
    #: Shorter documents are left out, characters.
    min_chars: int = 1
    #: Longer documents are left out, characters; null is no limit.
    max_chars: int | None = None
    #: Of documents with the same text only the first is kept.
    deduplicate: bool = False
    #: Records that cannot be read (no JSON, no UTF-8, no text) before the preparation is given up.
    max_rejected: int = 100
    #: Processes that tokenise; null is one for each core.
    num_workers: int | None = None


@dataclass
class DatasetConfig:
    """Where the tokens come from."""

    name: str = MISSING
    #: Prefix of a .bin/.idx pair, prepared here or Megatron's own; a given path wins over the sample.
    path: str | None = None
    #: Use the text that ships with quantexp (byte tokenizer) where no path is given.
    sample: bool = False
    #: Several prefixes instead of one path, each with its share of the samples: {PREFIX: 0.7, OTHER: 0.3}.
    blend: Any = None
    #: Raw text for `quantexp prepare`: a file, folder, pattern or hf:NAME of a Hugging Face dataset; or a list of such.
    source: Any = None
    #: null is the one the data was prepared with, else huggingface.
    tokenizer: TokenizerKind | None = None
    #: Folder or tokenizer.json (huggingface), or model file; null is the copy beside prepared data.
    tokenizer_path: str | None = None
    #: How a tiktoken file's text is cut into words, as a regular expression; null goes by the file's number of ranks.
    tokenizer_pattern: str | None = None
    #: The token that ends a document, by its name; null is the tokenizer's own.
    eod: str | None = None
    #: Shares of train, validation and test documents; null is as prepared, else 95,5,0.
    split: str | None = None
    #: Whether tokens attend to tokens of their own document alone; else to all before them in the sample.
    mask_documents: bool = False
    #: Whether the prediction that follows the end of a document is left out of the loss.
    mask_eod_loss: bool = False
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    #: What is shown: the name, or the name and "(built-in sample)"; filled in by `load`.
    label: str | None = None
