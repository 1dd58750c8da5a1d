"""config.json files that nobody published: refused in one line, or planned as a model with exactly their numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantexp.cli import plan
from quantexp.config.compose import compose
from quantexp.schema import Experiment
from tests.hostile.answers import Answer, Tally, answer, check
from tests.model.huggingface.published import DEEPSEEK, FAMILIES, LLAMA31
from tests.model.huggingface.test_configuration import PUBLISHED_DEEPSEEK, PUBLISHED_LLAMA32

Cases = Iterator[random.Random]

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 1.5, 1e-300, 1e38, 1e308, float("inf"), float("nan")),
    *(
        2**31,
        2**63,
        10**18,
        10**400,
        "",
        "3",
        "false",
        "null",
        "silu",
        "gelu",
        [],
        [1],
        {},
        {"a": 1},
    ),
    *({"factor": 2}, {"type": "yarn"}, {"rope_type": 3}, "\x1b[31m", "\0", [[[]]], "x" * 10_000),
]
#: config.json's key -> where the model holds the same number.
SAME = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_sequence_length",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
    "rope_theta": "rotary_base",
    "initializer_range": "init_std",
    "kv_lora_rank": "mla.kv_lora_rank",
    "v_head_dim": "mla.v_head_dim",
    "qk_nope_head_dim": "mla.qk_head_dim",
    "n_routed_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
    "norm_topk_prob": "moe.norm_topk_prob",
    "aux_loss_alpha": "moe.aux_loss_coefficient",
}


@pytest.fixture
def folder(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a published model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp / ".cache"))
    (in_tmp / "published").mkdir()
    return in_tmp / "published"


def _planned(folder: Path, *words: str) -> Answer:
    return answer(["plan", f"model.from_hf='{folder}'", "training.seq_length=64", *words])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1_000_000_000},
        {"hidden_size": 10**17},
        {"architectures": []},
        {"architectures": 3},
        {"architectures": ["MyForCausalLM"]},
        {"rope_scaling": 3},
        {"rope_scaling": "llama3"},
        {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
        {"tie_word_embeddings": "false"},
        {"num_key_value_heads": "2"},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": 1e39},
        {"model_type": ["llama"]},
    ],
    ids=str,
)
def test_entry_that_was_planned_as_another_model_is_refused(
    folder: Path, changes: dict[str, Any]
) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA31, **changes}))
    refused = _planned(folder)
    check(refused, ends=[1])
    (key,) = changes
    assert {"num_hidden_layers": "model.num_layers"}.get(key, key) in refused.err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"hidden_size": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{\x00}\x00",
        b'{"model_type": "llama"',
        b'"' + b"x" * 1_000_000 + b'"',
    ],
    ids=lambda content: repr(content[:20]),
)
def test_file_that_is_no_configuration_is_refused_in_one_line(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    check(_planned(folder), ends=[1])


def _changed(source: random.Random) -> tuple[dict[str, Any], str, Any]:
    """A configuration, and one entry of it with another value, also within rope_scaling."""
    base = source.choice(
        [*FAMILIES.values(), LLAMA31, DEEPSEEK, PUBLISHED_LLAMA32, PUBLISHED_DEEPSEEK]
    )
    content = json.loads(json.dumps(base))
    known = {*content, *SAME, "rope_parameters", "auto_map", "head_dim", "quantization_config"}
    key, value = source.choice(sorted(known)), source.choice(VALUES)
    within = content.get("rope_scaling")
    if isinstance(within, dict) and source.random() < 0.3:
        within[source.choice([*within])] = value
        return content, "rope_scaling", value
    if source.random() < 0.1:
        content.pop(key, None)
    else:
        content[key] = value
    return content, key, value


def _held(experiment: Experiment, key: str, content: dict[str, Any]) -> bool:
    """Whether the model has the number of the file, for the keys with a number of their own."""
    if key not in SAME or content.get(key) is None:
        return True
    value: Any = experiment.model
    for name in SAME[key].split("."):
        value = getattr(value, name, None)
        if value is None:
            return True  # the model has no such part
    return bool(value == content[key]) and isinstance(value, bool) == isinstance(content[key], bool)


def test_no_configuration_ends_in_a_traceback_a_hang_or_another_model(
    folder: Path, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Experiment] = []

    def recording(*arguments: object) -> Experiment:
        planned.append(compose(*arguments))  # type: ignore[arg-type]
        return planned[-1]

    monkeypatch.setattr(plan, "compose", recording)
    tally = Tally()
    for source in cases:
        content, key, value = _changed(source)
        text = json.dumps(content)
        if source.random() < 0.2:
            at = source.randrange(len(text))
            text, key = (
                text[:at] + source.choice(["", "}", "9", '"', "\\"]) + text[at + 1 :],
                "bytes",
            )
        (folder / "config.json").write_text(text)
        planned.clear()
        with tally.case(key, value):
            answered = _planned(folder, "training=fast")
            check(answered)
            tally.accepted += answered.code == 0
            for experiment in planned:
                assert _held(experiment, key, content), experiment.model
    tally.report()
