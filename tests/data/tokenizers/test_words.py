"""Tokenising word by word equals the `tokenizers` library: every id, on text of every kind."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from quantexp.data.sample import read_sample
from quantexp.data.tokenizers.load import HuggingFaceTokenizer
from quantexp.data.tokenizers.words import Words, words_of

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    own = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence(
        [own, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


CUTS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": split(LLAMA3),
    "o200k": split(O200K),
}


def trained(folder: Path, cut: Any, **changes: Any) -> Path:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = cut
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((d.text for d in read_sample("wikipedia")), trainer)
    for key, value in changes.items():
        setattr(tokenizer, key, value)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def wild(number: int) -> list[str]:
    """Texts of letters, digits, marks, blanks and line ends of all scripts, in any order."""
    chance = random.Random(1)
    plain = [
        *"aZé 's'LL'd  \n\r\t\u00a0\u2028\u3000\u0085",
        *"019½²٣!?/…«-_'\u2019\u017f\u0301\u200d",
    ]
    wide = [chr(c) for c in range(0x20, 0x30000) if not 0xD800 <= c < 0xE000]
    return [
        "".join(
            chance.choice(plain) if chance.random() < 0.93 else chance.choice(wide)
            for _ in range(chance.randint(0, 40))
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("name", CUTS)
def test_ids_are_the_librarys_on_any_text(tmp_path: Path, name: str) -> None:
    path = trained(tmp_path, CUTS[name])
    library = Tokenizer.from_file(str(path))
    texts = [*wild(700), *(d.text for d in read_sample("dolma")), "", "a <|endoftext|> b", "<|"]
    own = HuggingFaceTokenizer(path)
    library.encode_special_tokens = True
    expected = [e.ids for e in library.encode_batch(texts, add_special_tokens=False)]
    assert [list(ids) for ids in own.tokenize_all(texts)] == expected
    words = words_of(library, path.read_bytes())
    assert words is not None
    by_words = [words.ids(text) for text in texts]
    pairs = [(ids, e) for ids, e in zip(by_words, expected, strict=True) if ids is not None]
    assert all(ids == e for ids, e in pairs)
    if name != "o200k":  # the two libraries interpret its pattern differently
        assert len(pairs) > len(texts) // 2, "the fast way is the usual one"
    assert by_words[-2] is None, "special tokens are the library's"
    assert by_words[-3] == []


def test_a_character_that_is_split_differently_is_left_to_the_library(tmp_path: Path) -> None:
    path = trained(tmp_path, CUTS["llama3"])
    library = Tokenizer.from_file(str(path))

    class Other:
        """Treats z as not a letter."""

        def findall(self, text: str) -> list[str]:
            import regex

            pieces: list[str] = regex.findall(
                LLAMA3.replace(r"\p{L}", "[\\p{L}--z]"), text, regex.V1
            )
            return pieces

    words = Words(library, Other(), [])
    assert words.ids("an owl") == library.encode("an owl").ids
    assert words.ids("a lazy owl") is None
    assert words.ids("an owl") is not None


def test_words_are_cached_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantexp.data.tokenizers.words._MAX_WORDS", 3)
    path = trained(tmp_path, CUTS["gpt2"])
    library = Tokenizer.from_file(str(path))
    words = words_of(library, path.read_bytes())
    assert words is not None
    text = "an owl hunts at night over fields"
    assert words.ids(text) == library.encode(text).ids
    assert len(words) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": normalizers.NFC()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": split(r"(a)|b")},
        {"pre_tokenizer": split(r"(?:a|aa)+b")},
    ],
)
def test_a_tokenizer_that_does_more_is_left_to_the_library(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = trained(tmp_path, CUTS["gpt2"], **changes)
    library = Tokenizer.from_file(str(path))
    assert words_of(library, path.read_bytes()) is None
    texts = wild(50)
    expected = [e.ids for e in library.encode_batch(texts, add_special_tokens=False)]
    assert [list(i) for i in HuggingFaceTokenizer(path).tokenize_all(texts)] == expected


def test_without_the_regex_library_all_is_left_to_the_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "regex", None)
    path = trained(tmp_path, CUTS["gpt2"])
    assert words_of(Tokenizer.from_file(str(path)), path.read_bytes()) is None


def test_a_pattern_that_regex_cannot_read_is_left_to_the_library(tmp_path: Path) -> None:
    path = trained(tmp_path, CUTS["llama3"])
    content = json.loads(path.read_bytes())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "("
    library = Tokenizer.from_file(str(path))
    assert words_of(library, json.dumps(content).encode()) is None


def test_a_saved_truncation_and_padding_do_not_touch_documents(tmp_path: Path) -> None:
    path = trained(tmp_path, pre_tokenizers.Whitespace())
    library = Tokenizer.from_file(str(path))
    expected = library.encode("an owl hunts").ids
    library.enable_truncation(2)
    library.enable_padding(length=50)
    library.save(str(path))
    own = HuggingFaceTokenizer(path)
    assert own.tokenize("an owl hunts") == list(own.tokenize_all(["an owl hunts"])[0]) == expected
    assert len(expected) > 2
