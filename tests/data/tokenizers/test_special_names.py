"""The name of a special token in a document is text, whatever the kind of tokenizer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quantexp.data.tokenizers.load import ByteTokenizer, load_tokenizer
from quantexp.data.tokenizers.model_files import SentencePieceTokenizer
from quantexp.data.tokenizers.protocol import Tokenizer as OwnTokenizer
from tests.data.prepare.made import lines, prepared, rows

from .test_load import write_tokenizer
from .test_model_files import PATTERN, write_ranks

END = "<|endoftext|>"
Make = Callable[[Path], OwnTokenizer]


def saved(folder: Path, tokenizer: Any, eod: str = END) -> OwnTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer("huggingface", str(folder), eod=eod)


def byte_level(folder: Path, is_special: bool = True) -> OwnTokenizer:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens([AddedToken(END, special=is_special)])
    return saved(folder, tokenizer)


def unigram(folder: Path) -> OwnTokenizer:
    """Its vocabulary has the name itself, as T5's has `</s>`, and it folds wide characters."""
    pieces = [(letter, -9.0) for letter in sorted({*END, *"an owl"} - {" "})]
    model = models.Unigram([("<unk>", 0.0), (END, 0.0), ("\u2581", -1.0), *pieces], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", END])
    return saved(folder, tokenizer)


def words(folder: Path) -> OwnTokenizer:
    write_tokenizer(folder, {"?": 0, "an": 1, "owl": 2, "end": 3})
    return load_tokenizer("huggingface", str(folder), eod="end")


def ranks(folder: Path) -> OwnTokenizer:
    return load_tokenizer("tiktoken", str(write_ranks(folder / "a")), pattern=PATTERN)


def pieces(folder: Path, **options: Any) -> OwnTokenizer:
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"an owl {END} </s>"] * 9),
        model_writer=out,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=3,
        **options,
    )
    (folder / "a.model").write_bytes(out.getvalue())
    return SentencePieceTokenizer(folder / "a.model", END)


KINDS: dict[str, Make] = {
    "special": byte_level,
    "not special": lambda folder: byte_level(folder, is_special=False),
    "in the vocabulary": unigram,
    "word": words,
    "ranks": ranks,
    "control": lambda folder: pieces(folder, control_symbols=[END]),
    "user defined": lambda folder: pieces(folder, user_defined_symbols=[END]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_document_has_an_end_inside_it(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind](tmp_path)
    name = next(name for name, i in tokenizer.specials.items() if i == tokenizer.eod)
    texts = [f"an {name} owl", name, name * 3, "an owl", ""]
    ids = [list(each) for each in tokenizer.tokenize_all(texts)]
    assert all(tokenizer.eod not in each for each in ids)
    assert len(ids[0]) > len(ids[3]), "the name is text"
    assert ids[4] == []
    assert [tokenizer.names_special(text) for text in texts] == [True, True, True, False, False]
    if kind in ("special", "not special", "ranks"):
        assert tokenizer.detokenize(ids[0]).strip() == texts[0]


def test_a_name_that_normalisation_makes_is_no_end(tmp_path: Path) -> None:
    tokenizer = unigram(tmp_path)
    wide = END.replace("<", "\uff1c").replace(">", "\uff1e")
    assert all(tokenizer.eod not in each for each in tokenizer.tokenize_all([f"an {wide} owl"]))


def test_what_is_evaluated_is_tokenised_as_the_library_does(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.tokenize_all([END])[0] != [tokenizer.eod] == tokenizer.tokenize(END)


def test_bytes_have_no_names() -> None:
    assert not ByteTokenizer().names_special(END)


def test_the_report_counts_documents_that_name_a_special_token(tmp_path: Path) -> None:
    byte_level(tmp_path)
    contents = [f"an {END} owl", "an owl", "<s>"]
    (tmp_path / "a.jsonl").write_bytes(lines(rows(contents)))
    options: dict[str, Any] = {
        "tokenizer_path": str(tmp_path),
        "eod": END,
        "split": "1",
        "tokenizer": None,
    }
    card = prepared(tmp_path / "a.jsonl", tmp_path / "own", **options).card
    assert card.report["num_naming_specials"] == 2
    assert card.num_tokens[0] == sum(map(len, contents)) + 3
    assert json.loads((tmp_path / "own.json").read_text())["report"]["num_naming_specials"] == 2
