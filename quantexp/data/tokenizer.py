"""Text to token ids: bytes, which need no download, or a Hugging Face tokenizer from disk.

Nothing is ever downloaded. A tokenizer here is what `binary` and Megatron's GPTDataset ask for,
and a fingerprint of what decides its ids, for a run's identity. Neither wraps text in special
tokens: `eod` is appended by `binary`.
"""

import hashlib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from quantexp.errors import DataError

#: What ends a document where no `tokenizer_config.json` says so.
_EOD_NAMES = ("<|end_of_text|>", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>")


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

    def tokenize(self, text: str) -> list[int]:
        """Returns the text's ids, without `eod`."""

    def detokenize(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids; `eod` has none."""

    def fingerprint(self) -> str:
        """Returns the sha256, in hex, of what decides the ids."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, the end of a document as 256."""

    vocab_size = 257
    eod = 256

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What Megatron hashes to name its cached indices."""
        return _identifiers(self)

    def tokenize(self, text: str) -> list[int]:
        """Returns the text's UTF-8 bytes; the empty text has none."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Iterable[int]) -> str:
        """Returns the text; `eod` is dropped, bytes that are no character become U+FFFD.

        A training sample may begin or end within a character, so that this is no error.
        """
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """Returns the sha256, in hex, of the rule: there is but one byte tokenizer."""
        return hashlib.sha256(b"byte: utf-8 0..255, eod 256").hexdigest()


class HuggingFaceTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` library.

    Attributes:
        vocab_size: the largest id and one, added tokens included; a vocabulary with holes counts
            them. eod: the id of the token that ends a document.
    """

    def __init__(self, path: Path) -> None:
        """Reads a `tokenizer.json`, or a folder that has one.

        Raises:
            DataError: `tokenizers` is not installed, or the file is missing, unreadable or names
                no end of document.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        content = _read_tokenizer_json(file)
        self._tokenizer = _parse_tokenizer_json(file, content)
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.eod = vocab[_eod_name(file, vocab)]
        self._fingerprint = hashlib.sha256(content + f"\neod {self.eod}".encode()).hexdigest()

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What Megatron hashes to name its cached indices."""
        return _identifiers(self)

    def tokenize(self, text: str) -> list[int]:
        """Returns the text's ids, without the special tokens a template would add."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Returns the text; `eod` and other special tokens are dropped."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def fingerprint(self) -> str:
        """Returns the sha256, in hex, of `tokenizer.json` and `eod`, not of their path."""
        return self._fingerprint


def load_tokenizer(name: str, path: str | None) -> Tokenizer:
    """Returns the tokenizer called `byte` (which takes no path) or `huggingface` (which needs one).

    Raises:
        DataError: another name, or a path that is missing, not needed or unreadable.
    """
    match name, path:
        case "byte", None:
            return ByteTokenizer()
        case "byte", _:
            raise DataError(
                f"dataset.tokenizer=byte takes no path, got dataset.tokenizer_path={path}; "
                "drop it, or set dataset.tokenizer=huggingface"
            )
        case "huggingface", None:
            raise DataError(
                "dataset.tokenizer=huggingface needs a path: give a folder with tokenizer.json, "
                "or that file, as dataset.tokenizer_path=..."
            )
        case "huggingface", str():
            return HuggingFaceTokenizer(Path(path))
    raise DataError(f"dataset.tokenizer must be byte or huggingface, got {name}")


def _identifiers(tokenizer: Tokenizer) -> dict[str, str]:
    return {"class": type(tokenizer).__name__, "fingerprint": tokenizer.fingerprint()}


def _read_tokenizer_json(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file}: cannot read the tokenizer ({error.strerror}); give a folder with "
            "tokenizer.json, or that file, as dataset.tokenizer_path=..."
        ) from error


def _parse_tokenizer_json(file: Path, content: bytes) -> Any:
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise DataError(
            "dataset.tokenizer=huggingface needs the tokenizers library: pip install tokenizers"
        ) from error
    # The library raises a bare Exception for a file it cannot use.
    try:
        return library.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:
        raise DataError(f"{file}: not a tokenizer.json: {error}") from error


def _eod_name(file: Path, vocab: dict[str, int]) -> str:
    """Returns the name of `eod`: `eos_token` of `tokenizer_config.json`, else a usual one."""
    config = file.with_name("tokenizer_config.json")
    declared = _declared_eos(config) if config.is_file() else None
    names = _EOD_NAMES if declared is None else (declared,)
    for name in names:
        if name in vocab:
            return name
    raise DataError(
        f"{file}: no token ends a document: looked for {', '.join(names)}; name one of its tokens "
        f"as eos_token in {config}"
    )


def _declared_eos(config: Path) -> str | None:
    """Returns `eos_token`, a string or an object with `content`; None where there is none."""
    try:
        declared = json.loads(config.read_bytes()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{config}: not a JSON object: {error}") from error
    if isinstance(declared, dict):
        declared = declared.get("content")
    return declared if isinstance(declared, str) else None
