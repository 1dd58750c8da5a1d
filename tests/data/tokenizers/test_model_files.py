import base64
import io
import sys
from pathlib import Path

import pytest

from quantexp.data.tokenizers.load import load_tokenizer
from quantexp.data.tokenizers.model_files import TiktokenTokenizer
from quantexp.data.tokenizers.protocol import failures
from quantexp.errors import DataError

TEXT = "An owl hunts at night; 景德鎮, zwölf 1234 <|endoftext|> owls"
PATTERN = r"\w+|\W"


def write_ranks(path: Path, merged: int = 20) -> Path:
    """The bytes and some pairs of letters, in the form of tiktoken's files."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a + b).encode() for a in letters for b in letters][:merged]
    tokens = [*(bytes([i]) for i in range(256)), *pairs]
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model, trained on a few words."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["an owl hunts at night", "owls hunt over fields of barley"] * 9),
        model_writer=out,
        vocab_size=40,
        byte_fallback=False,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(out.getvalue())
    return path


def test_ranks_give_the_ids_of_the_library_and_special_tokens_are_text(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "own.tiktoken")
    tokenizer = load_tokenizer("tiktoken", str(path), pattern=PATTERN)
    ids = tokenizer.tokenize(TEXT)
    assert tokenizer._encoding.decode(ids) == TEXT  # type: ignore[attr-defined]
    assert max(ids) < tokenizer.eod == 276 == tokenizer.vocab_size - 1
    assert tokenizer.tokenize("abc") == [256 + 1, ord("c")]
    assert [list(i) for i in tokenizer.tokenize_all([TEXT, ""])] == [ids, []]
    assert [tokenizer.text_of(i) for i in tokenizer.tokenize("abc")] == ["ab", "c"]
    assert (tokenizer.text_of(0xE2), tokenizer.text_of(10_000)) == ("\\xe2", "")
    assert tokenizer.detokenize([*ids, 10_000]) == TEXT


@pytest.mark.parametrize(
    ("number", "eod", "vocab_size"),
    [(50_256, 50_256, 50_257), (100_256, 100_257, 100_277), (128_000, 128_001, 128_256)],
)
def test_a_published_vocabulary_is_recognised_by_its_number_of_ranks(
    tmp_path: Path, number: int, eod: int, vocab_size: int
) -> None:
    tokens = [*(bytes([i]) for i in range(256)), *(b"\0\1%d" % i for i in range(number - 256))]
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    tokenizer = load_tokenizer("tiktoken", str(tmp_path / "tokenizer.model"))
    assert (tokenizer.eod, tokenizer.vocab_size) == (eod, vocab_size)
    ids = tokenizer.tokenize(TEXT)
    assert tokenizer._encoding.decode(ids) == TEXT  # type: ignore[attr-defined]


def test_the_pattern_of_gpt2_is_the_librarys() -> None:
    import regex
    from tiktoken_ext.openai_public import r50k_pat_str

    from quantexp.data.tokenizers.model_files import _CL100K, _GPT2

    words = "I've 12345 owls!!  They'll\n\n hunt\t at\r\nnight; it's DON'T é景 x"
    assert regex.findall(_GPT2, words) == regex.findall(r50k_pat_str, words)
    # cl100k_base's, verified by its rules: three digits at most, any case of 's, line ends together.
    pieces = regex.findall(_CL100K, words)
    assert "".join(pieces) == words
    assert {"123", "45", "'T", "'ve", "\n\n"} <= set(pieces)


def test_a_model_gives_its_pieces_and_ends_a_document(model: Path) -> None:
    tokenizer = load_tokenizer("sentencepiece", str(model))
    ids = tokenizer.tokenize("an owl hunts")
    assert tokenizer._model.decode(ids) == "an owl hunts"  # type: ignore[attr-defined]
    assert tokenizer.eod == 2
    assert max(ids) < tokenizer.vocab_size <= 40
    assert tokenizer.tokenize_all(["an owl hunts", ""]) == [ids, []]
    assert load_tokenizer("sentencepiece", str(model), eod="<s>").eod == 1
    assert "".join(map(tokenizer.text_of, ids)).strip() == "an owl hunts"
    assert tokenizer.detokenize(ids) == "an owl hunts"


def test_fingerprints_follow_content_and_end(tmp_path: Path, model: Path) -> None:
    def tiktoken(merged: int, pattern: str = PATTERN) -> str:
        return TiktokenTokenizer(write_ranks(tmp_path / "a", merged), pattern=pattern).fingerprint()

    assert tiktoken(5) == tiktoken(5)
    assert len({tiktoken(5), tiktoken(6), tiktoken(5, r"\w|\W")}) == 3
    pieces = [load_tokenizer("sentencepiece", str(model), eod=eod) for eod in (None, "</s>", "<s>")]
    assert [p.fingerprint() == pieces[0].fingerprint() for p in pieces] == [True, True, False]
    assert pieces[0].unique_identifiers["class"] == "SentencePieceTokenizer"


@pytest.mark.parametrize(
    ("kind", "content", "options", "words"),
    [
        ("tiktoken", None, {}, r"x: cannot read the tokenizer \(No such file.*dataset\.tokenizer_path="),
        ("tiktoken", b"no rank\n", {}, r"x: not a file of tiktoken's: a line must be a token in base64"),
        ("tiktoken", b"YQ== 0\n", {}, r"x: has 1 ranks, which is no published .*tokenizer_pattern="),
        ("tiktoken", b"YQ== 0\n", {"pattern": "("}, r"tokenizer_pattern=\(: not a pattern"),
        ("tiktoken", b"YQ== 0\n", {"pattern": "a", "eod": "b"}, r"has no token dataset\.eod=b; it has <\|endoft"),
        ("tiktoken", b"YQ== -1\n", {"pattern": "a"}, r"x: not a file of tiktoken's: ranks must differ and not be neg"),
        ("tiktoken", b"YQ== 0\nYg== 0\n", {"pattern": "a"}, r"x: not a file of tiktoken's: ranks must differ"),
        ("tiktoken", b"YQ== 4000000000\n", {"pattern": "a"}, r"x: its largest id is 4,000,000,001, where 16,777,216"),
        ("sentencepiece", b"no model", {}, r"x: not a SentencePiece model: "),
        ("huggingface", b"{}", {"pattern": "a"}, r"tokenizer_pattern is for dataset\.tokenizer=tiktoken, got"),
        ("byte", None, {"eod": "a"}, r"takes no eod, got dataset\.eod=a; drop it"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_refused(
    tmp_path: Path, kind: str, content: bytes | None, options: dict[str, str], words: str
) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_tokenizer(kind, None if kind == "byte" else str(tmp_path / "x"), **options)


def test_an_end_of_document_that_a_model_lacks_is_refused(model: Path) -> None:
    with pytest.raises(
        DataError, match=r"has no token dataset\.eod=<none>; name one of its pieces"
    ):
        load_tokenizer("sentencepiece", str(model), eod="<none>")


def test_a_model_without_an_end_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sentencepiece

    monkeypatch.setattr(sentencepiece.SentencePieceProcessor, "eos_id", lambda self: -1)
    with pytest.raises(DataError, match=r"no piece ends a document; name one as dataset\.eod="):
        load_tokenizer("sentencepiece", str(model))


@pytest.mark.parametrize("kind", ["tiktoken", "sentencepiece"])
def test_a_missing_library_names_the_extra(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(
        DataError, match=rf"needs the {kind} library: pip install 'quantexp\[data\]'"
    ):
        load_tokenizer(kind, str(tmp_path))


def test_a_text_that_the_library_panics_on_is_an_error(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "own.tiktoken")
    tokenizer = load_tokenizer("tiktoken", str(path), pattern="(a|b|ab)*(?=c)x")
    words = r"own\.tiktoken: this tokenizer's library fails on a text: .*BacktrackLimitExceeded"
    for use in (tokenizer.tokenize, lambda text: tokenizer.tokenize_all([text])):
        with pytest.raises(DataError, match=words):
            use("ab" * 200)


def test_an_interruption_is_not_reported_as_an_error_of_the_library(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), failures(tmp_path, "x"):
        raise KeyboardInterrupt
