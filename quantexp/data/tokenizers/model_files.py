"""Tokenizers in one model file: tiktoken's ranks and SentencePiece.

A line of a tiktoken file has a token in base64 and its rank, and nothing else. The file does not say how text is split
into words before ranks are applied, nor which tokens are special. For the published vocabularies the number of ranks
determines both. For others `dataset.tokenizer_pattern` gives the split, and the id after the last rank ends a document.
"""

import base64
import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.data.tokenizers.protocol import FAILS, Tokenizer, check_ids, failures, shown
from quantexp.errors import DataError

#: How cl100k_base and Llama 3 split text (tiktoken's openai_public, Meta's llama3).
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: How GPT-2 splits text.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Published:
    """What a file of ranks does not contain."""

    pattern: str
    #: Special tokens and their ids.
    special: dict[str, int]
    #: The special token that ends a document.
    eod: str
    #: Number of ids, including those reserved for special tokens.
    vocab_size: int


#: By the number of ranks.
_PUBLISHED = {
    50_256: _Published(_GPT2, {"<|endoftext|>": 50_256}, "<|endoftext|>", 50_257),
    100_256: _Published(_CL100K, {"<|endoftext|>": 100_257}, "<|endoftext|>", 100_277),
    128_000: _Published(
        _CL100K,
        {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001, "<|eot_id|>": 128_009},
        "<|end_of_text|>",
        128_256,
    ),
}


class TiktokenTokenizer(Tokenizer):
    """A file of ranks, run by the `tiktoken` library; special tokens in a text are plain text.

    Attributes:
        vocab_size: the published number of ids, else one more than `eod`. eod: the id that ends a document. files: the
            file of ranks.
    """

    def __init__(self, path: Path, eod: str | None = None, pattern: str | None = None) -> None:
        """Reads the file.

        Raises:
            DataError: `tiktoken` is not installed; the file cannot be read or is not a file of ranks; the number of
                ranks is unpublished and there is no pattern; or there is no such `eod`.
        """
        library = _library("tiktoken", "tiktoken")
        content = _read(path)
        ranks = _ranks(path, content)
        known = _published(path, ranks, pattern)
        name = known.eod if eod is None else eod
        if name not in known.special:
            raise DataError(
                f"{path}: has no token dataset.eod={name}; it has {', '.join(known.special)}"
            )
        check_ids(path, max(known.vocab_size, *ranks.values()) if ranks else 0)
        if min(ranks.values(), default=0) < 0 or len(set(ranks.values())) < len(ranks):
            raise DataError(
                f"{path}: not a file of tiktoken's: ranks must differ and not be negative"
            )
        with failures(path, f"dataset.tokenizer_pattern={known.pattern}: not a pattern"):
            self._encoding = library.Encoding(
                path.name,
                pat_str=known.pattern,
                mergeable_ranks=ranks,
                special_tokens=known.special,
            )
        self.eod, self.vocab_size, self.files = known.special[name], known.vocab_size, (path,)
        self.specials = known.special
        decides = f"\npattern {known.pattern} eod {self.eod}".encode()
        self._fingerprint = hashlib.sha256(content + decides).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        """Returns the text's ids."""
        with failures(self.files[0], FAILS):
            return list(self._encoding.encode_ordinary(text))

    def tokenize_all(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Returns the ids of each document."""
        with failures(self.files[0], FAILS):
            return [self._encoding.encode_ordinary(text) for text in texts]

    def text_of(self, token: int) -> str:
        """Returns the text of one id; empty for an id that the file does not have."""
        with failures(self.files[0], FAILS):
            return shown(self._bytes(token))

    def detokenize(self, ids: list[int]) -> str:
        """Returns the text of the ids, nothing for those that the file does not have."""
        with failures(self.files[0], FAILS):
            return b"".join(map(self._bytes, ids)).decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        try:
            return bytes(self._encoding.decode_single_token_bytes(token))
        except KeyError:
            return b""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, run by the `sentencepiece` library.

    Attributes:
        vocab_size: the number of pieces. eod: the id that ends a document, `</s>` by default. files: the model.
    """

    def __init__(self, path: Path, eod: str | None = None) -> None:
        """Reads the model.

        Raises:
            DataError: `sentencepiece` is not installed, the file cannot be read or is not a model, or it has no such
                `eod`.
        """
        library = _library("sentencepiece", "sentencepiece")
        content = _read(path)
        with failures(path, "not a SentencePiece model"):
            self._model = library.SentencePieceProcessor(model_proto=content)
        self.vocab_size = int(self._model.get_piece_size())
        check_ids(path, self.vocab_size)
        self.eod, self.files = self._eod(path, eod), (path,)
        controls = filter(self._model.is_control, range(self.vocab_size))
        self.specials = {self._model.id_to_piece(i): i for i in {*controls, self.eod}}
        self._fingerprint = hashlib.sha256(content + f"\neod {self.eod}".encode()).hexdigest()

    def _eod(self, path: Path, name: str | None) -> int:
        if name is None:
            eos = int(self._model.eos_id())
            if eos < 0:
                raise DataError(f"{path}: no piece ends a document; name one as dataset.eod=...")
            return eos
        piece = int(self._model.piece_to_id(name))
        if self._model.id_to_piece(piece) != name:
            raise DataError(f"{path}: has no token dataset.eod={name}; name one of its pieces")
        return piece

    def tokenize(self, text: str) -> list[int]:
        """Returns the text's ids."""
        with failures(self.files[0], FAILS):
            return list(self._model.encode(text))

    def tokenize_all(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Returns the ids of each document."""
        with failures(self.files[0], FAILS):
            encode = self._model.encode
            return [self._as_text(text, encode(text), encode) for text in texts]

    def text_of(self, token: int) -> str:
        """Returns the piece, with a space for its mark of one."""
        with failures(self.files[0], FAILS):
            return str(self._model.id_to_piece(token)).replace("\u2581", " ")

    def detokenize(self, ids: list[int]) -> str:
        """Returns the text of the ids."""
        with failures(self.files[0], FAILS):
            return str(self._model.decode(ids))


def _library(name: str, kind: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"dataset.tokenizer={kind} needs the {name} library: pip install 'quantexp[data]'"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot read the tokenizer ({error.strerror}); give its model file as "
            "dataset.tokenizer_path=..."
        ) from error


def _ranks(path: Path, content: bytes) -> dict[bytes, int]:
    try:
        lines = (line.split() for line in content.splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise DataError(
            f"{path}: not a file of tiktoken's: a line must be a token in base64 and its rank "
            f"({error})"
        ) from error


def _published(path: Path, ranks: dict[bytes, int], pattern: str | None) -> _Published:
    known = _PUBLISHED.get(len(ranks))
    if pattern is None and known is not None:
        return known
    if pattern is None:
        raise DataError(
            f"{path}: has {len(ranks):,} ranks, which is no published vocabulary known here; say how "
            "it cuts text into words: dataset.tokenizer_pattern=REGULAR_EXPRESSION"
        )
    eod = max(ranks.values(), default=-1) + 1
    return _Published(pattern, {"<|endoftext|>": eod}, "<|endoftext|>", eod + 1)
