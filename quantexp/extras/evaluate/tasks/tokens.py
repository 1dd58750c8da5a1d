"""The tokenizer of tasks: that of transformers, which lm-evaluation-harness's own model `hf` uses too.

`tokenizer.json` alone does not determine the tokens of `hf`: `tokenizer_config.json` names the tokens of beginning and
end, and may replace the template. Bytes and files of tiktoken and SentencePiece have neither a template nor a token of
the beginning.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from quantexp.data.tokenizers.load import HuggingFaceTokenizer
from quantexp.data.tokenizers.protocol import Tokenizer, failures
from quantexp.model.huggingface import CONFIG, GENERATION


class TaskTokenizer(Protocol):
    """What tasks need of a tokenizer of transformers."""

    bos_token: str | None
    bos_token_id: int | None
    eos_token_id: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's ids, with those of the template or without; names of special tokens are these tokens."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids; ids that the tokenizer does not have are left out."""


class _Plain:
    """A tokenizer without special tokens but the end of a document."""

    bos_token: str | None = None
    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, tokenizer.eod

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.tokenize(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        known = range(self._tokenizer.vocab_size)
        kept = [
            i for i in ids if i in known and not (skip_special_tokens and i == self.eos_token_id)
        ]
        return self._tokenizer.detokenize(kept)


def task_tokenizer(tokenizer: Tokenizer, eod: str | None = None) -> TaskTokenizer:
    """The tokenizer of a run as tasks use it.

    Args:
        tokenizer: of the run's data.
        eod: the name of the token that ends a document, if the run chose another than the tokenizer's own.

    Raises:
        DataError: transformers cannot read its files, or they need code of their own.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return _Plain(tokenizer)
    file = tokenizer.files[0]
    with failures(file, "transformers cannot read this tokenizer"):
        own = _read(file)
        if eod is not None or own.eos_token_id is None:
            own.eos_token = own.convert_ids_to_tokens(tokenizer.eod)
    result: TaskTokenizer = own
    return result


def _read(file: Path) -> Any:
    library: Any = importlib.import_module("transformers")
    if file.name != "tokenizer.json":
        return library.PreTrainedTokenizerFast(tokenizer_file=str(file))
    return library.AutoTokenizer.from_pretrained(
        file.parent, local_files_only=True, trust_remote_code=False
    )


def generation_config(weights: Path) -> dict[str, Any]:
    """The settings of generated answers, by generation_config.json or else config.json, as transformers reads it.

    Args:
        weights: their folder, or a file in it; there are no settings without a config.json.

    Raises:
        DataError: transformers cannot read a file.
    """
    folder = weights if weights.is_dir() else weights.parent
    if not (folder / CONFIG).is_file():
        return {}
    library: Any = importlib.import_module("transformers")
    with failures(folder / CONFIG, "transformers cannot read this configuration"):
        if (folder / GENERATION).is_file():
            own = library.GenerationConfig.from_pretrained(folder, local_files_only=True)
        else:
            model = library.AutoConfig.from_pretrained(folder, local_files_only=True)
            own = library.GenerationConfig.from_model_config(model)
        return {key: value for key, value in own.to_dict().items() if value is not None}
