"""The tokens at the largest values of a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.analysis.tensors.largest import largest_tokens, largest_words
from quantexp.capture.store.manifest import TokenList

WORDS = {3: " the", 5: "cat", 8: "."}
LINE: dict[str, Any] = {
    **{"module": "fc1", "layer": 0, "layer_type": "linear", "tensor": "input"},
    **{"iteration": 2, "micro_batch": 1, "rank": 0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TokenList(tmp_path, 0, lambda token: WORDS[token]).add(2, 1, 0, [6, 7], [[3, 5, 8], [8, 8, 3]])
    return tmp_path


@pytest.fixture
def x() -> Tensor:
    """[T=3, B=2, D=4]."""
    x = torch.zeros(3, 2, 4)
    x[1, 0, 2], x[1, 0, 3] = -9.0, 8.0  # two of one token: it is named once
    x[0, 1, 0], x[2, 1, 1] = 4.0, torch.inf
    x[2, 0, 0] = 0.5
    return x


def test_each_token_is_named_once_with_its_sample_and_position(folder: Path, x: Tensor) -> None:
    tokens = largest_tokens(folder, LINE, x)
    assert [(t["value"], t["text"], t["token"], t["sample"], t["position"]) for t in tokens] == [
        (-9.0, "cat", 5, 6, 1),
        (4.0, ".", 8, 7, 0),
        (0.5, ".", 8, 6, 2),
    ]
    assert largest_words(tokens[:1]) == "-9 at 'cat' (sample 6, token 1)"


def test_a_sample_of_tokens_is_named_by_its_own_positions(folder: Path, x: Tensor) -> None:
    line = LINE | {"sample": {"axis": 0, "indices": [0, 2], "shape": [3, 2, 4], "of": "tokens"}}
    first, *_ = largest_tokens(folder, line, x[[0, 2]])
    assert (first["text"], first["position"]) == (".", 0)
    of_sequences = LINE | {"sample": {"axis": 1, "indices": [0], "shape": [3, 2, 4], "of": "x"}}
    assert largest_tokens(folder, of_sequences, x[:, :1]) == ()


def test_heads_are_part_of_a_token(folder: Path, x: Tensor) -> None:
    line = LINE | {"module": "attention", "layer_type": "attention", "tensor": "query"}
    assert largest_tokens(folder, line, x.view(3, 2, 2, 2))[0]["text"] == "cat"


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({"tensor": "weight"}, (3, 4)),
        ({"tensor": "attn_weights", "layer_type": "attention"}, (3, 2, 4, 4)),
        ({"micro_batch": None}, (3, 2, 4)),
        ({"iteration": 1}, (3, 2, 4)),
        ({}, (3, 3, 4)),
        ({}, (4, 2, 4)),
    ],
)
def test_what_has_no_known_tokens_names_none(
    folder: Path, change: dict[str, Any], shape: tuple[int, ...]
) -> None:
    assert largest_tokens(folder, LINE | change, torch.ones(shape)) == ()


def test_zeros_and_a_capture_without_tokens_name_none(folder: Path, tmp_path: Path) -> None:
    assert largest_tokens(folder, LINE, torch.zeros(3, 2, 4)) == ()
    assert largest_tokens(tmp_path / "elsewhere", LINE, torch.ones(3, 2, 4)) == ()
