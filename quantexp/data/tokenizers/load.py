"""Tokenizers: bytes, which need no download, or a tokenizer from disk.

Nothing is ever downloaded. A tokenizer here has the interface that `prepare` and Megatron's GPTDataset need, and a
fingerprint of everything that determines its ids, for a run's identity. None adds special tokens: `eod` is appended
when documents are written. tiktoken and SentencePiece files are in `model_files`.
"""

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantexp.data.tokenizers.protocol import FAILS, Tokenizer, check_ids, failures, shown
from quantexp.data.tokenizers.words import Words, words_of
from quantexp.errors import DataError, UnreadableError
from quantexp.folders import user_path
from quantexp.reading.json_files import require_json

#: The files of each kind.
_NEEDS = {
    "huggingface": "a folder with tokenizer.json, or that file",
    "tiktoken": "a file of ranks (cl100k_base.tiktoken, or Meta's tokenizer.model of Llama 3)",
    "sentencepiece": "a SentencePiece model (tokenizer.model)",
}
#: What a folder may hold besides tokenizer.json that belongs to its tokenizer.
COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
)
#: Names of the end-of-document token if no `tokenizer_config.json` names it.
_EOD_NAMES = ("<|end_of_text|>", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255; the end of a document is 256."""

    vocab_size = 257
    eod = 256
    files: tuple[Path, ...] = ()
    _fingerprint = hashlib.sha256(b"byte: utf-8 0..255, eod 256").hexdigest()

    def tokenize(self, text: str) -> list[int]:
        """Returns the text's UTF-8 bytes; empty for the empty text."""
        return list(text.encode("utf-8"))

    def tokenize_all(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Returns the UTF-8 bytes of each text, as bytes."""
        return [text.encode("utf-8") for text in texts]

    def text_of(self, token: int) -> str:
        """Returns the byte as text."""
        return "<end of document>" if token == self.eod else shown(bytes([token]))

    def detokenize(self, ids: list[int]) -> str:
        """Returns the bytes as text, without ends of documents."""
        return bytes(each for each in ids if each != self.eod).decode("utf-8", errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, run by the `tokenizers` library.

    Attributes:
        vocab_size: one more than the largest id, added tokens included; gaps in the vocabulary count. eod: the id that
            ends a document.
    """

    def __init__(self, path: Path, eod: str | None = None) -> None:
        """Reads a `tokenizer.json`, or a folder that contains one.

        Args:
            path: the file or folder.
            eod: the name of the token that ends a document; None selects `eos_token` of a `tokenizer_config.json`
                beside it, else one of the usual names.

        Raises:
            DataError: `tokenizers` is not installed, or the file is missing, unreadable or has no token that ends a
                document.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        content = _read_tokenizer_json(file)
        self._tokenizer = _parse_tokenizer_json(file, content)
        self._tokenizer.no_truncation()  # documents stay whole, whatever the file specifies
        self._tokenizer.no_padding()
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        check_ids(file, self.vocab_size)
        eod_name = _eod_name(file, vocab) if eod is None else _given_eod(file, vocab, eod)
        self.eod = vocab[eod_name]
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.specials = {token.content: i for i, token in added if token.special}
        self.specials |= {eod_name: self.eod}
        companions = (file.with_name(name) for name in COMPANIONS)
        self.files = (file, *(each for each in companions if each.is_file()))
        self._content, self._has_tried_words = content, False
        self._words: Words | None = None
        self._fingerprint = hashlib.sha256(content + f"\neod {self.eod}".encode()).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        """Returns the text's ids, without the special tokens of a template."""
        with failures(self.files[0], FAILS):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize_all(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Returns the ids of each document, word by word if the tokenizer supports it (see `words`)."""
        with failures(self.files[0], FAILS):
            if not self._has_tried_words:
                self._words, self._has_tried_words = words_of(self._tokenizer, self._content), True
            cached = [None if self._words is None else self._words.ids(text) for text in texts]
            others = [text for text, ids in zip(texts, cached, strict=True) if ids is None]
            rest = iter(self._encode(others))
            all_ids = [next(rest) if ids is None else ids for ids in cached]
            return [
                self._as_text(text, ids, lambda piece: self._encode([piece])[0])
                for text, ids in zip(texts, all_ids, strict=True)
            ]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of texts, in which the library does not look for special tokens."""
        self._tokenizer.encode_special_tokens = True
        try:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = False
        return [each.ids for each in encoded]

    def text_of(self, token: int) -> str:
        """Returns the text of one id; of a part of a character that of the vocabulary."""
        with failures(self.files[0], FAILS):
            text: str = self._tokenizer.decode([token], skip_special_tokens=False)
            if text and "\ufffd" not in text:
                return text
            return str(self._tokenizer.id_to_token(token) or "")

    def detokenize(self, ids: list[int]) -> str:
        """Returns the text of the ids, special tokens included."""
        with failures(self.files[0], FAILS):
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def load_tokenizer(
    name: str, path: str | None, *, eod: str | None = None, pattern: str | None = None
) -> Tokenizer:
    """Returns the tokenizer `byte` (which takes no path), or another (which needs one).

    Args:
        name: byte, huggingface, tiktoken or sentencepiece.
        path: its file, or for huggingface also a folder.
        eod: the name of the token that ends a document; None means the tokenizer's own.
        pattern: how tiktoken splits text into words.

    Raises:
        DataError: another name; a path that is missing, not needed or unreadable; an `eod` or a pattern for a tokenizer
            that takes none.
    """
    if pattern is not None and name != "tiktoken":
        raise DataError(
            f"dataset.tokenizer_pattern is for dataset.tokenizer=tiktoken, got {name}; drop it"
        )
    if name == "byte":
        for key, value in (("tokenizer_path", path), ("eod", eod)):
            if value is not None:
                raise DataError(
                    f"dataset.tokenizer=byte takes no {key.rpartition('_')[2]}, got "
                    f"dataset.{key}={value}; drop it, or set dataset.tokenizer=huggingface"
                )
        return ByteTokenizer()
    if name not in _NEEDS:
        raise DataError(f"dataset.tokenizer must be byte or {', '.join(_NEEDS)}, got {name}")
    if path is None:
        raise DataError(
            f"dataset.tokenizer={name} needs a path: give {_NEEDS[name]}, as "
            "dataset.tokenizer_path=..., or dataset.tokenizer=byte, which needs nothing"
        )
    file = user_path(path)
    if name == "huggingface":
        return HuggingFaceTokenizer(file, eod)
    from quantexp.data.tokenizers.model_files import SentencePieceTokenizer, TiktokenTokenizer

    if name == "tiktoken":
        return TiktokenTokenizer(file, eod, pattern)
    return SentencePieceTokenizer(file, eod)


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
            "dataset.tokenizer=huggingface needs the tokenizers library: pip install 'quantexp[data]'"
        ) from error
    with failures(file, "not a tokenizer.json"):
        return library.Tokenizer.from_str(content.decode("utf-8"))


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


def _given_eod(file: Path, vocab: dict[str, int], name: str) -> str:
    if name in vocab:
        return name
    raise DataError(f"{file}: has no token dataset.eod={name}; name one of its tokens")


def _declared_eos(config: Path) -> str | None:
    """Returns `eos_token`, a string or an object with `content`; None if there is none."""
    try:
        declared = require_json(config, dict[str, Any]).get("eos_token")
    except UnreadableError as error:
        raise DataError(str(error)) from error
    if isinstance(declared, dict):
        declared = declared.get("content")
    return declared if isinstance(declared, str) else None
