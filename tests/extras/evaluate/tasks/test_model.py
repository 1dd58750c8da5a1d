"""The model of lm-evaluation-harness against transformers: its logits, its generation, its tokens.

`test_hf` compares it with the harness's own model `hf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quantexp.data.tokenizers.load import load_tokenizer
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import ConfigError, DataError
from quantexp.extras.evaluate.tasks.model import SchemeModel, generation_of
from quantexp.extras.evaluate.tasks.tokens import task_tokenizer
from tests.extras.evaluate.tasks.tokenizer_files import VOCAB, write_tokenizer
from tests.task_files import WORDS

T = 24
BOS, EOD, STOP = 0, 1, 2


@pytest.fixture(scope="module")
def transformer() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        # Random weights of the usual size give logits that hardly differ.
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Whole words; `<bos>` before each text, as in Llama's tokenizer.json."""
    folder = write_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), "<bos>", "", {"bos_token": "<bos>"}
    )
    return load_tokenizer("huggingface", str(folder))


class Run:
    """A model under test, the sequences that it was given, and the requests it has done."""

    def __init__(self, transformer: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
        self.transformer, self.given, self.done = transformer, list[list[int]](), 0
        self.model = SchemeModel(
            self._logits,
            task_tokenizer(tokenizer),
            T,
            self._advance,
            {},
            score_template=False,
        )

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        self.given.append(list(tokens))
        return self.logits(tokens)

    def _advance(self) -> None:
        self.done += 1

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.transformer(torch.tensor([list(tokens)])).logits[0]

    def score(self, tokens: Sequence[int], number: int) -> float:
        """The log-likelihood of the last tokens, by transformers."""
        log_p = self.logits(tokens[:-1]).double().log_softmax(-1)[-number:]
        return float(sum(log_p[i, token] for i, token in enumerate(tokens[-number:])))


@pytest.fixture
def run(transformer: LlamaForCausalLM, tokenizer: Tokenizer) -> Run:
    return Run(transformer, tokenizer)


def instances(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    metadata = ("task", 0, 1)
    return [Instance(kind, {}, each, i, metadata) for i, each in enumerate(arguments)]


def ids(text: str) -> list[int]:
    return [VOCAB.index(word) for word in text.split()]


def test_the_tokenizers_template_comes_first(run: Run) -> None:
    assert run.model.tok_encode("the city") == [BOS, *ids("the city")]
    assert run.model.tok_encode("the city", add_special_tokens=False) == ids("the city")


def test_continuations_are_scored(run: Run) -> None:
    requests = instances("loglikelihood", ("the city", " of water"), ("", "history"))
    (first, _), (second, _) = run.model.loglikelihood(requests, disable_tqdm=True)
    # Both compute in float64 from the same float32 logits.
    assert first == pytest.approx(run.score([BOS, *ids("the city of water")], 2), abs=1e-9)
    assert second == pytest.approx(run.score([BOS, *ids("history")], 1), abs=1e-9)
    assert run.given == [[BOS, *ids("the city of")], [BOS]], "a request is a pass by itself"
    assert run.done == 2


def test_a_continuation_is_greedy_if_each_token_is_the_likeliest(run: Run) -> None:
    likeliest = int(run.logits([BOS, *ids("the")])[-1].argmax())
    words = [VOCAB[likeliest], next(w for w in WORDS if w != VOCAB[likeliest])]
    requests = instances("loglikelihood", *(("the", f" {word}") for word in words))
    assert [greedy for _, greedy in run.model.loglikelihood(requests)] == [True, False]


def test_what_is_too_long_loses_its_beginning(run: Run) -> None:
    context = " ".join(["city of"] * T)
    ((score, _),) = run.model.loglikelihood(instances("loglikelihood", (context, " water")))
    kept = [*ids(context), *ids("water")][-T - 1 :]
    assert run.given == [kept[:-1]]
    assert score == pytest.approx(run.score(kept, 1), abs=1e-9)
    assert run.model.cut == 1


def test_a_longer_text_is_predicted_in_windows_each_token_once(run: Run) -> None:
    tokens = [*ids("the city of water"), *ids("history of the world time") * 6]
    text = " ".join(VOCAB[token] for token in tokens)
    (total,) = run.model.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    first = run.score([BOS, *tokens[:T]], T)
    rest = len(tokens) - T
    # The last window is whole, and predicts only what the first left.
    expected = first + run.score(tokens[-T - 1 :], rest)
    assert total == pytest.approx(expected, abs=1e-9)
    assert run.done == 1


def test_a_text_that_is_scored_begins_and_ends_without_the_template(
    transformer: LlamaForCausalLM, tmp_path: Path
) -> None:
    """`hf` scores `<bos>` after `<bos>`, and of a continuation the `<eos>` behind it."""
    folder = write_tokenizer(tmp_path, "<bos>", "<eos>", {"bos_token": "<bos>"})
    run = Run(transformer, load_tokenizer("huggingface", str(folder)))
    ((score, _),) = run.model.loglikelihood(instances("loglikelihood", ("the", " city")))
    assert score == pytest.approx(run.score([BOS, *ids("the city")], 1), abs=1e-9)
    texts = instances("loglikelihood_rolling", ("the city",), ("<bos> the city",))
    expected = run.score([BOS, *ids("the city")], 2)
    assert run.model.loglikelihood_rolling(texts) == pytest.approx([expected] * 2, abs=1e-9)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.0}])
def test_generation_is_that_of_transformers(run: Run, options: dict[str, Any]) -> None:
    options |= {"until": ["."], "max_gen_toks": 8}
    (text,) = run.model.generate_until(instances("generate_until", ("the river", options)))
    start = torch.tensor([[BOS, *ids("the river")]])
    model: Any = run.transformer
    written = model.generate(
        start, max_new_tokens=8, do_sample=False, eos_token_id=[EOD, STOP], pad_token_id=EOD
    )[0, start.shape[1] :].tolist()
    kept = [token for token in written if token not in (EOD, STOP)]
    assert kept, "weights that write nothing test nothing"
    assert text.split() == [VOCAB[token] for token in kept]


def test_generation_ends_at_any_of_its_stops(run: Run) -> None:
    options = {"until": "the", "max_gen_toks": 8}
    (whole,) = run.model.generate_until(
        instances("generate_until", ("the river", {"max_gen_toks": 8}))
    )
    stop = whole.split()[1]
    options["until"] = [stop, "zebra"]
    (text,) = run.model.generate_until(instances("generate_until", ("the river", options)))
    assert text == whole[: whole.index(stop)]
    assert run.model.cut == 0


def test_answers_drawn_at_random_are_refused(run: Run) -> None:
    options = {"do_sample": True, "temperature": 0.7}
    words = r"^evaluate\.tasks: task draws its answers at random \(do_sample\), and only"
    with pytest.raises(ConfigError, match=words):
        run.model.generate_until(instances("generate_until", ("the", options)))


@pytest.mark.parametrize(
    ("options", "generation", "words"),
    [
        ({"num_beams": 4}, {}, "num_beams=4 .* drop it in a copy of the task"),
        (
            {},
            {"repetition_penalty": 1.05},
            r"repetition_penalty=1.05 .* the weights with another generation_config\.json",
        ),
    ],
)
def test_answers_of_other_tokens_than_the_likeliest_are_refused(
    options: dict[str, Any], generation: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^evaluate.tasks: {words}$"):
        generation_of("task", options, 512, generation)
    neutral = {"num_beams": 1, "repetition_penalty": 1.0}
    assert generation_of("task", {**options, **neutral}, 512, {}) == ([], 256)


def test_answers_without_a_token_are_refused(run: Run) -> None:
    with pytest.raises(DataError, match=r"^evaluate\.tasks: an answer has no token of its own"):
        run.model.loglikelihood(instances("loglikelihood", ("the city", "\n")))


def test_answers_longer_than_a_sequence_are_refused(run: Run) -> None:
    words = rf"^training\.seq_length={T} is too short for an answer of 30 tokens; set a larger one$"
    long = " city" * 30
    with pytest.raises(ConfigError, match=words):
        run.model.loglikelihood(instances("loglikelihood", ("the", long)))
    with pytest.raises(ConfigError, match=r"an answer of up to 256 tokens; set a larger one$"):
        run.model.generate_until(instances("generate_until", ("the", {})))
