import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quantexp.data.tokenizers.load import ByteTokenizer, load_tokenizer
from quantexp.errors import DataError


def write_tokenizer(
    folder: Path, vocab: dict[str, int], special: dict[str, int] | None = None
) -> Path:
    """A tokenizer of whole words, as written by the tokenizers library."""
    added = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}
    content: dict[str, Any] = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}}
    content["added_tokens"] = [
        {"id": i, "content": name, "special": True} | added for name, i in (special or {}).items()
    ]
    content["model"] = model
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content | {"normalizer": None, "post_processor": None}))
    return path


def test_the_byte_tokenizer_gives_utf8() -> None:
    tokenizer = ByteTokenizer()
    text = "Böttger, 景德鎮, \U0001f426\n"
    ids = tokenizer.tokenize(text)
    assert ids == list(text.encode())
    assert tokenizer.tokenize("") == []
    texts = [tokenizer.text_of(token) for token in (ord("B"), 0xC3, tokenizer.eod)]
    assert texts == ["B", "\\xc3", "<end of document>"]
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text
    assert tokenizer.detokenize([0xC3]) == "\ufffd"


def test_every_byte_is_an_id_and_the_end_of_a_document_is_the_last_one() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)
    assert max(tokenizer.tokenize("\U0010ffff")) < 256


def test_the_byte_tokenizers_fingerprint_is_frozen() -> None:
    fingerprint = ByteTokenizer().fingerprint()
    assert fingerprint.startswith("2a10bc0b1ea0597e")
    assert ByteTokenizer().unique_identifiers == {
        "class": "ByteTokenizer",
        "fingerprint": fingerprint,
    }


def test_byte_is_loaded_by_name() -> None:
    assert isinstance(load_tokenizer("byte", None), ByteTokenizer)


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        (
            "bpe",
            None,
            r"dataset\.tokenizer must be byte or huggingface, tiktoken, sentencepiece, got bpe",
        ),
        ("byte", "x", r"byte takes no path, got dataset\.tokenizer_path=x"),
        ("huggingface", None, r"needs a path: .*dataset\.tokenizer_path=\.\.\."),
        ("huggingface", "/none", r"/none: cannot read the tokenizer .*dataset\.tokenizer_path="),
    ],
)
def test_a_wrong_choice_is_refused_with_the_remedy(name: str, path: str | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_tokenizer(name, path)


def test_a_missing_library_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    write_tokenizer(tmp_path, {"?": 0})
    with pytest.raises(DataError, match=r"needs the tokenizers library: .*quantexp\[data\]"):
        load_tokenizer("huggingface", str(tmp_path))


class TestHuggingFace:
    def test_a_folder_and_its_file_give_the_same_tokenizer(self, tmp_path: Path) -> None:
        file = write_tokenizer(tmp_path, {"?": 0, "owl": 1, "an": 2}, {"<|endoftext|>": 3})
        tokenizer = load_tokenizer("huggingface", str(tmp_path))
        assert tokenizer.tokenize("an owl") == [2, 1]
        assert (tokenizer.eod, tokenizer.vocab_size) == (3, 4)
        assert [tokenizer.text_of(token) for token in (1, 3)] == ["owl", "<|endoftext|>"]
        assert tokenizer.detokenize([2, 1]) == "an owl"
        other = load_tokenizer("huggingface", str(file))
        assert other.unique_identifiers == tokenizer.unique_identifiers

    def test_the_vocabulary_ends_after_its_largest_id(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, {"?": 0, "</s>": 900})
        assert load_tokenizer("huggingface", str(tmp_path)).vocab_size == 901

    @pytest.mark.parametrize("eos", ["end", {"content": "end"}])
    def test_the_configuration_beside_names_the_end(self, tmp_path: Path, eos: object) -> None:
        write_tokenizer(tmp_path, {"?": 0, "end": 1, "</s>": 2})
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer("huggingface", str(tmp_path)).eod == 1

    def test_the_fingerprint_follows_content_and_end_not_the_path(self, tmp_path: Path) -> None:
        def fingerprint(folder: str, vocab: dict[str, int], eos: str) -> str:
            (tmp_path / folder).mkdir()
            write_tokenizer(tmp_path / folder, vocab)
            (tmp_path / folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{eos}"}}')
            return load_tokenizer("huggingface", str(tmp_path / folder)).fingerprint()

        vocab = {"?": 0, "a": 1, "b": 2}
        first = fingerprint("first", vocab, "a")
        assert fingerprint("moved", vocab, "a") == first
        assert fingerprint("other_end", vocab, "b") != first
        assert fingerprint("other_vocab", vocab | {"c": 3}, "a") != first

    def test_a_tokenizer_without_an_end_is_refused(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, {"?": 0})
        with pytest.raises(DataError, match=r"no token ends a document: looked for .*</s>; name"):
            load_tokenizer("huggingface", str(tmp_path))

    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json: "):
            load_tokenizer("huggingface", str(tmp_path))

    def test_a_broken_configuration_is_refused(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, {"?": 0})
        (tmp_path / "tokenizer_config.json").write_text("[")
        with pytest.raises(DataError, match=r"tokenizer_config\.json, line 1: unexpected end"):
            load_tokenizer("huggingface", str(tmp_path))

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"a": 4_294_967_295},
                r"its largest id is 4,294,967,295, where 16,777,216 ids are the",
            ),
            ({"a": -1}, r"not a tokenizer\.json: invalid value: integer `-1`"),
            (
                {"a": 2_000_000_000},
                r"its largest id is 2,000,000,000, where 16,777,216 ids are the",
            ),
        ],
    )
    def test_ids_that_no_model_has_are_refused(
        self, tmp_path: Path, changes: dict[str, int], words: str
    ) -> None:
        vocab = {"a": 0, "b": 1, "ab": 2, "</s>": 3} | changes
        model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
        with pytest.raises(DataError, match=words):
            load_tokenizer("huggingface", str(tmp_path))

    def test_a_text_that_the_library_panics_on_is_an_error(self, tmp_path: Path) -> None:
        """The pattern backtracks without end, and the library stops."""
        pattern = {
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
        model = {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}
        content = {"version": "1.0", "model": model, "pre_tokenizer": pattern}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        tokenizer = load_tokenizer("huggingface", str(tmp_path))
        for use in (tokenizer.tokenize, lambda text: tokenizer.tokenize_all([text])):
            with pytest.raises(
                DataError, match=r"json: this tokenizer's library fails on a text: .*retry-limit"
            ):
                use("a" * 60 + "c")

    def test_a_configuration_nested_without_end_is_refused_and_names_no_code_to_run(
        self, tmp_path: Path
    ) -> None:
        write_tokenizer(tmp_path, {"?": 0, "</s>": 1})
        config = tmp_path / "tokenizer_config.json"
        config.write_text('{"eos_token":' + "[" * 100_000)
        with pytest.raises(DataError, match=r"tokenizer_config\.json, line 1: depth limit"):
            load_tokenizer("huggingface", str(tmp_path))
        (tmp_path / "own.py").write_text("raise SystemExit('this code must not run')")
        config.write_text('{"auto_map": {"AutoTokenizer": ["own.X", null]}, "eos_token": "</s>"}')
        assert load_tokenizer("huggingface", str(tmp_path)).eod == 1
