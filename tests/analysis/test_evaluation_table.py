from __future__ import annotations

import io

from rich.console import Console

from quantexp.analysis.evaluation_table import Result, evaluated_words, print_each, print_results
from tests.analysis.evaluation_results import evaluated, result


def printed(*results: Result, width: int = 120) -> str:
    out = io.StringIO()
    print_results(results, Console(file=out, width=width))
    return out.getvalue()


def test_each_evaluation_has_a_line_with_its_interval() -> None:
    text = printed(result("bf16", 0.0), result("linear_mxfp4"))
    assert "2 evaluations" in text
    (line,) = [line for line in text.splitlines() if line.startswith("linear_mxfp4")]
    words = "linear_mxfp4 3.0200 20.50 +0.0200 +0.0100 to +0.0300 50.00% 99.00% 1.00e-03 completed"
    assert " ".join(line.split()) == words
    assert "4,096 tokens of 57 documents" in text
    assert "each by itself" not in text
    assert "no interval" not in text


def test_evaluation_without_results_or_finite_loss_says_so() -> None:
    text = printed(
        Result("linear_mxfp8", "", "failed", None), result("linear_mxfp4", None, perplexity=None)
    )
    lines = {line.split()[0]: line.split() for line in text.splitlines() if "linear" in line}
    assert lines["linear_mxfp8"] == ["linear_mxfp8", *"-" * 7, "failed"]
    assert lines["linear_mxfp4"].count("finite") == 3
    assert "no interval: it takes 8 documents or more, and finite losses" in text


def test_narrow_terminal_keeps_the_difference() -> None:
    text = printed(result("FA_linear_mxfp4"), width=60)
    assert all(len(line) <= 60 for line in text.splitlines() if "FA_linear_mxfp4" in line)
    assert "+0.0200" in text


def test_parts_are_listed_by_divergence_and_the_rest_is_counted() -> None:
    text = printed(result("linear_mxfp4", modules=4))
    listed = [line.split() for line in text.splitlines() if " layer " in line]
    assert len(listed) == 8
    assert listed[0][1:3] == ["layer", "3"]
    assert [line[2] for line in listed] == sorted((line[2] for line in listed), reverse=True)
    assert any(line[3] == "fc1" for line in listed)
    assert "and 4 more, in the figure" in text


def test_parts_of_one_evaluation_are_listed_without_its_table() -> None:
    out = io.StringIO()
    print_each([result("linear_mxfp4", modules=1)], Console(file=out, width=100))
    text = out.getvalue()
    assert "each by itself" in text
    assert "perplexity" not in text


def test_words_of_one_evaluation() -> None:
    assert evaluated_words(evaluated()) == {
        "loss": "3.0200 nats a token, perplexity 20.50",
        "to bf16": "+0.0200 nats a token, 95% interval +0.0100 to +0.0300 over documents",
        "top token": "right 50.00%, in bf16 51.00%; the same as in bf16 99.00%",
        "KL": "1.00e-03 nats a token from bf16",
    }
    assert evaluated_words(evaluated(interval=None))["to bf16"] == "+0.0200 nats a token"
