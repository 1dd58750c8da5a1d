"""The names that are close to a mistyped word."""

from __future__ import annotations

import pytest

from quantexp.terminal.close_matches import did_you_mean, near, one_of

NAMES = ["training.iterations", "training.lr", "capture.iterations", "evaluation.every", "model"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("iterations", ["training.iterations", "capture.iterations"]),
        ("itertions", ["training.iterations", "capture.iterations"]),
        ("trainin.lr", ["training.lr"]),
        ("MODEL", ["model"]),
        ("scheme", []),
        ("", []),
    ],
)
def test_name_matches_as_a_whole_or_by_its_last_part(word: str, expected: list[str]) -> None:
    assert near(word, NAMES) == expected


def test_name_much_less_alike_than_the_best_is_no_suggestion() -> None:
    assert near("mxpf8", ["mxfp8", "mxfp4", "fp8"]) == ["mxfp8"]


def test_number_of_suggestions_has_a_limit() -> None:
    assert near("a1", ["a2", "a3", "a4"], 2) == []
    assert near("ab1", ["ab2", "ab3", "ab4"], 2) == ["ab2", "ab3"]


def test_names_are_joined_as_in_a_sentence() -> None:
    assert one_of(["a"]) == "a"
    assert one_of(["a", "b", "c"]) == "a, b or c"
    assert did_you_mean([]) == ""
    assert did_you_mean(["a", "b"]) == "did you mean a or b?"
