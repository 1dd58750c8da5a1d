"""Tokenises text word by word, for byte-level BPE tokenizers (GPT-2, Llama 3, Qwen and similar ones).

Such a tokenizer splits text into words by a regular expression and applies its merges within each word only, so a word
has the same ids everywhere. Most words are frequent: a cache provides their ids, and only new words go to the
`tokenizers` library's model. This is three times as fast as the library, which spends its time on splitting and
on data besides the ids.

The `regex` library splits the words. It must split as the tokenizer does, which is verified: each character is compared
once, in many contexts, with the library's own split. The library handles text with a character that differs,
or with a special token.
"""

import importlib
import re
from itertools import chain
from typing import Any

from quantexp.reading.json_files import json_of

#: How `ByteLevel` itself splits text (GPT-2).
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: A group that repeats can try exponentially many ways. The library stops such a search, `regex` does not.
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
#: Number of cached words; later ones are rare.
_MAX_WORDS = 200_000
#: Contexts of a character in which both splits must agree.
_PROBES = (
    "a{0}a {0} A{0}{0}1{0} 1",
    "'{0} '{0}a x'{0}{0}y",
    " {0}\n{0}\r\n {0}  {0} \n",
    "!{0}? .{0}{0}  {0}a{0}B",
    "é{0}景{0}½{0}\u0301{0}\t{0}",
    "{0}",
    " {0}",
    "12{0}345{0}6789",
)


class Words(dict[str, tuple[int, ...]]):
    """Word -> ids; missing words are computed."""

    def __init__(self, library_tokenizer: Any, pattern: Any, specials: list[str]) -> None:
        super().__init__()
        self._tokenizer, self._cut, self._specials = library_tokenizer, pattern.findall, specials
        self._model = library_tokenizer.model
        self._letters = _byte_letters()
        self._same: set[str] = set()
        self._different: set[str] = set()

    def __missing__(self, word: str) -> tuple[int, ...]:
        letters = "".join(map(self._letters.__getitem__, word.encode("utf-8")))
        ids = tuple(token.id for token in self._model.tokenize(letters))
        if len(self) < _MAX_WORDS:
            self[word] = ids
        return ids

    def ids(self, text: str) -> list[int] | None:
        """Returns the text's ids; None if the library must compute them."""
        if any(special in text for special in self._specials):
            return None
        characters = set(text)
        if not characters <= self._same and not self._cut_alike(characters):
            return None
        words = self._cut(text)
        if sum(map(len, words)) != len(text):
            return None
        return list(chain.from_iterable(map(self.__getitem__, words)))

    def _cut_alike(self, characters: set[str]) -> bool:
        for character in characters - self._same - self._different:
            alike = all(self._alike(probe.format(character)) for probe in _PROBES)
            (self._same if alike else self._different).add(character)
        return characters.isdisjoint(self._different)

    def _alike(self, text: str) -> bool:
        own = [
            "".join(map(self._letters.__getitem__, word.encode("utf-8")))
            for word in self._cut(text)
        ]
        return own == [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def words_of(library_tokenizer: Any, content: bytes) -> Words | None:
    """Returns an empty word cache for a tokenizer, or None if the tokenizer does not work word by word.

    Args:
        library_tokenizer: the object of the `tokenizers` library.
        content: its `tokenizer.json`.
    """
    try:
        parts = json_of(content)
    except ValueError:  # beyond the bounds of JSON that is read here
        return None
    pattern = _pattern(parts)
    if pattern is None or _REPEATED_GROUP.search(pattern):
        return None
    try:
        compiled = importlib.import_module("regex").compile(pattern)
    except (ImportError, ValueError):
        return None
    except Exception as error:
        if type(error).__module__.startswith(("regex", "_regex")):  # not in its grammar
            return None
        raise
    if compiled.groups:
        return None
    specials = [token["content"] for token in parts.get("added_tokens") or []]
    return Words(library_tokenizer, compiled, _shortest(specials))


def _pattern(parts: dict[str, Any]) -> str | None:
    """Returns the pattern that splits text, or None if the tokenizer does more than that."""
    model = parts.get("model") or {}
    plain = model.get("type") == "BPE" and not any(
        model.get(key)
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    if not plain or parts.get("normalizer") is not None:
        return None
    match parts.get("pre_tokenizer"):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _BYTE_LEVEL
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def _shortest(specials: list[str]) -> list[str]:
    """Returns the first characters of special tokens, enough to detect that one may be present."""
    starts = {special[:2] for special in specials}
    return sorted(starts)


def _byte_letters() -> dict[int, str]:
    """Returns the letter that represents each byte in a byte-level vocabulary (GPT-2).

    Printable characters of Latin-1 represent themselves, the others map to U+0100 onwards.
    """
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {b: chr(256 + i) for i, b in enumerate(others)}
