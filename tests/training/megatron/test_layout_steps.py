"""The comparison with stock Megatron-Core is one of equal computations."""

from __future__ import annotations

import re

import layout_steps
import pytest

from quantexp.training.megatron import collectives

_TINY = [
    *("training.precision=fp32", "model.hidden_size=64", "model.ffn_hidden_size=128"),
    *("training.seq_length=64", "training.global_batch_size=2", "model.init_std=0.1"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["dp2 distributed optimizer", "tp2 sp", "pp2 interleaved", "cp2"])
def test_layout_of_stock_classes_computes_the_same(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In fp32, where only the order of sums differs: a rank raises if loss or norm differ by more."""
    layout_steps.compare(name, _TINY, 1, 1)
    row = capfd.readouterr().out
    assert re.fullmatch(rf"\| {name} (\| \d+\.\d{{3}} ){{4}}(\| \d\.\d{{3}} \(.*\) ){{2}}\|\n", row)


def test_sides_that_differ_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "gather", lambda part: [part, 0.0])
    layout_steps.check_first_steps(
        {"": lambda *_: (5.0, 1.0), "stock": lambda *_: (5.0, 1.0)}, 1, 0.01, 0.01
    )
    for loss, norm in ((5.1, 1.0), (5.0, 1.1), (float("nan"), 1.0)):
        steps = {"quantexp": lambda *_: (5.0, 1.0), "stock": lambda *_, x=(loss, norm): x}
        with pytest.raises(RuntimeError, match=f"the two sides differ: loss 5.0 and {loss}, norm"):
            layout_steps.check_first_steps(steps, 1, 0.01, 0.01)
