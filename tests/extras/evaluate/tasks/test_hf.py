"""The model of tasks against the harness's own model `hf`, on a tiny random Llama, for many kinds of tokenizers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from quantexp.data.tokenizers.load import load_tokenizer
from quantexp.extras.evaluate.tasks.model import SchemeModel
from quantexp.extras.evaluate.tasks.tokens import generation_config, task_tokenizer
from tests.extras.evaluate.tasks.test_model import T, instances
from tests.extras.evaluate.tasks.tokenizer_files import VOCAB, write_tokenizer
from tests.task_files import WORDS

BOS = {"bos_token": "<bos>"}
#: What stands before and after a text by tokenizer.json, and tokenizer_config.json besides `eos_token`.
TOKENIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a template with the named beginning": ("<bos>", "", BOS),
    "a template with a beginning that nothing names": ("<bos>", "", {}),
    "a template with beginning and end": ("<bos>", "<eos>", BOS),
    "a named beginning without a template": ("", "", BOS),
    "a beginning as an object": (
        "",
        "",
        {"bos_token": {"content": "<bos>", "__type": "AddedToken"}},
    ),
    "no beginning": ("", "", {}),
    "a beginning that is the end": ("", "", {"bos_token": "<eos>"}),
    "a beginning that is not added": ("", "", {**BOS, "add_bos_token": False}),
}
TEXT = "the city of water"
LONG = " ".join([*WORDS, "of"] * 8)
PAIRS = [
    ("the city", " of water"),
    ("the city ", "of water"),
    ("", "history of time"),
    ("", "<bos> history"),
    ("<bos> the city", " of water"),
    ("<eos> the city", " of water"),
    ("the <bos> city", " of <eos> water"),
    (LONG, " water"),
]
TEXTS = [TEXT, LONG, f"<bos> {TEXT}", f"<eos> {TEXT}", f"{TEXT} <eos> {TEXT}"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of more ids than the tokenizer has; answers end at two ids, of which one is the tokenizer's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB) + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        # Random weights of the usual size give logits that hardly differ.
        initializer_range=0.5,
    )
    folder = tmp_path_factory.mktemp("weights")
    model = LlamaForCausalLM(config)
    ends = [VOCAB.index("<eos>"), VOCAB.index("city")]
    model.generation_config = GenerationConfig(eos_token_id=ends, do_sample=True, temperature=0.6)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def harness(weights: Path, request: pytest.FixtureRequest) -> Any:
    """The harness's class; it imports accelerate, of which it uses nothing for a given model on a CPU."""
    patch = pytest.MonkeyPatch()
    for name in ("accelerate", "accelerate.utils"):
        module: Any = ModuleType(name)
        module.__getattr__ = lambda _: None
        patch.setitem(sys.modules, name, module)
    from lm_eval.models.huggingface import HFLM

    yield HFLM
    patch.undo()


@pytest.fixture(params=TOKENIZERS)
def both(
    request: pytest.FixtureRequest, weights: Path, harness: Any, tmp_path: Path
) -> tuple[SchemeModel, Any]:
    """Our model, and theirs."""
    before, after, config = TOKENIZERS[request.param]
    write_tokenizer(tmp_path, before, after, config)
    model = LlamaForCausalLM.from_pretrained(weights).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    given: dict[str, Any] = {"batch_size": 1, "max_length": T, "softmax_dtype": "float64"}
    theirs = harness(pretrained=model, tokenizer=tokenizer, **given)

    @torch.no_grad()
    def logits(tokens: Sequence[int]) -> Tensor:
        return model(torch.tensor([list(tokens)])).logits[0]

    own = task_tokenizer(load_tokenizer("huggingface", str(tmp_path)))
    return SchemeModel(logits, own, T, lambda: None, generation_config(weights)), theirs


def test_scores_are_those_of_hf(both: tuple[SchemeModel, Any]) -> None:
    ours, theirs = (model.loglikelihood(instances("loglikelihood", *PAIRS)) for model in both)
    for pair, own, other in zip(PAIRS, ours, theirs, strict=True):
        # Both compute in float64 from the same float32 logits.
        assert own[0] == pytest.approx(other[0], abs=1e-9), pair
        assert own[1] == other[1], pair


def test_scores_of_whole_texts_are_those_of_hf(both: tuple[SchemeModel, Any]) -> None:
    requests = instances("loglikelihood_rolling", *((text,) for text in TEXTS))
    ours, theirs = (model.loglikelihood_rolling(requests) for model in both)
    assert ours == pytest.approx(theirs, abs=1e-9)


def test_answers_are_those_of_hf(both: tuple[SchemeModel, Any]) -> None:
    contexts = ["the river", "<bos> the river", "<eos> the", "water", "history", LONG]
    stops: list[Any] = [["."], ["city", "ti"], "the water", ["<unk>"], [], ["?", "<bos>"]]
    requests = instances(
        "generate_until",
        *(
            (context, {"until": until, "max_gen_toks": 12})
            for context, until in zip(contexts, stops, strict=True)
        ),
    )
    ours, theirs = (model.generate_until(requests) for model in both)
    assert ours == theirs
    assert any(ours), "weights that write nothing test nothing"
