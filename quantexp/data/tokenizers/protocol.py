"""The interface of a tokenizer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from quantexp.errors import DataError

#: More ids than any model has; a larger vocabulary is a damaged or hostile file.
_MAX_IDS = 1 << 24
#: What `failures` reports of a text.
FAILS = "this tokenizer's library fails on a text"


class Tokenizer(ABC):
    """What the data path and Megatron need."""

    #: One more than the largest id, `eod` included.
    vocab_size: int
    #: The id that ends a document.
    eod: int
    #: The names of its special tokens, `eod` included, with their ids; empty for bytes, which have no names.
    specials: Mapping[str, int] = MappingProxyType({})
    #: The files it was read from; copies of them give the same tokenizer.
    files: tuple[Path, ...]
    _fingerprint: str

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """The values that Megatron hashes to name its cached indices."""
        return {"class": type(self).__name__, "fingerprint": self.fingerprint()}

    def fingerprint(self) -> str:
        """Returns the sha256, in hex, of everything that determines the ids, independent of the files' paths."""
        return self._fingerprint

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Returns the text's ids, without `eod`; what the name of a special token gives is up to the library."""

    @abstractmethod
    def tokenize_all(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Returns the ids of each document, in one call, which is faster.

        The name of a special token is text, so no document has a special token, or `eod`, inside it.
        """

    @abstractmethod
    def text_of(self, token: int) -> str:
        """Returns the text of one id, for people; bytes that are no character of their own are escaped."""

    @abstractmethod
    def detokenize(self, ids: list[int]) -> str:
        """Returns the text of some ids; of bytes that are no character U+FFFD."""

    def names_special(self, text: str) -> bool:
        """Returns whether a text has the name of a special token."""
        return bool(self.specials) and self._names.search(text) is not None

    def _as_text(
        self, text: str, ids: Sequence[int], encode: Callable[[str], Sequence[int]]
    ) -> Sequence[int]:
        """Returns a document's ids, where `encode` may have given a special token for its name.

        Such a name is cut after its first character, and the pieces are encoded by themselves. An `eod` that is left,
        because its name has one character or because of the tokenizer's normalisation, is removed.
        """
        starts = [match.start() + 1 for match in self._names.finditer(text)]
        names = {match[0] for match in self._names.finditer(text)} if starts else set()
        if not {self.specials[name] for name in names}.isdisjoint(ids):
            pieces = (text[begin:end] for begin, end in pairwise([0, *starts, len(text)]))
            ids = [each for piece in pieces for each in encode(piece)]
        return [each for each in ids if each != self.eod] if self.eod in ids else ids

    @cached_property
    def _names(self) -> re.Pattern[str]:
        longest_first = sorted(self.specials, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))


def check_ids(path: Path, vocab_size: int) -> None:
    """Requires a vocabulary of a size that a model can have.

    Raises:
        DataError: it is larger.
    """
    if vocab_size > _MAX_IDS:
        raise DataError(
            f"{path}: its largest id is {vocab_size - 1:,}, where {_MAX_IDS:,} ids are the limit: this is no "
            "tokenizer of a model"
        )


@contextmanager
def failures(path: Path, problem: str) -> Iterator[None]:
    """Converts what a tokenizer's library raises, a panic of its Rust code included.

    Raises:
        DataError: the library fails; names the file.
    """
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        # A panic is no Exception, and its class can be imported from nowhere.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: {problem}: {first}") from error


def id_bytes(vocab_size: int) -> int:
    """Returns the bytes of an id in a `.bin`, by Megatron's rule."""
    return 2 if vocab_size < 65_500 else 4


def shown(content: bytes) -> str:
    """Bytes as text; those that are no character as escapes."""
    return content.decode("utf-8", errors="backslashreplace")
