"""Moments are rounded alike in every layout, and gradients are rounded where the scheme says, on several ranks.

Two ranks add their gradients in one order, so a distributed optimizer must equal one that is not to the last bit, in
spite of its ranges, which cut blocks. In other layouts, sums have another order; an element at a boundary of the format
may then be rounded to the other side, which leaves some 1e-5 of a weight after three steps. Scales of other elements
leave 1e-3.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_runs import Case, Result, run_all
from layouts import difference
from torch import Tensor

from .state_faults import FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLANT = "tests.training.megatron.state_faults:"
#: Ranges of two ranks end within a block of a layer's weight.
BASE = ["training.precision=fp32", "quant=bf16", "model.hidden_size=88", "model.num_layers=4"]
DIVIDED = "training.distributed_optimizer=true"
#: One scale a tensor, and blocks; both with random numbers by position.
MOMENTS = [
    *("quant.optimizer.exp_avg.format=fp8_e4m3", "quant.optimizer.exp_avg.rounding=stochastic"),
    *("quant.optimizer.exp_avg_sq.format=mxfp8", "quant.optimizer.exp_avg_sq.rounding=stochastic"),
    "training.iterations=3",
]


def results(cases: dict[str, Case], folder: Path) -> dict[str, Result | str]:
    return dict(zip(cases, run_all(list(cases.values()), folder), strict=True))


def equal(a: Result | str, b: Result | str) -> bool:
    assert isinstance(a, Result), a
    assert isinstance(b, Result), b
    return all(torch.equal(a.weights[name], weight) for name, weight in b.weights.items())


def test_moments_of_every_layout_are_those_of_one_process(tmp_path: Path) -> None:
    words = [*BASE, *MOMENTS]
    tensor = ["parallel.tensor=2", "parallel.unaligned=accept"]
    ranks = results(
        {
            "one": Case(words, 1),
            "dp2": Case(words, 2),
            "dp2 divided": Case([*words, DIVIDED], 2),
            "tp2": Case([*words, *tensor], 2),
            "pp2": Case([*words, "parallel.pipeline=2"], 2),
            "cp2 divided": Case([*words, "parallel.context=2", DIVIDED], 2),
            "own blocks": Case([*words, DIVIDED], 2, PLANT + "blocks_of_own_range"),
            "own amax": Case([*words, DIVIDED], 2, PLANT + "amax_of_own_range"),
        },
        tmp_path / "cases",
    )
    assert equal(ranks["dp2 divided"], ranks["dp2"])
    assert not equal(ranks["own blocks"], ranks["dp2"])
    assert "its scale is that of an amax of" in str(ranks["own amax"])
    one = ranks["one"]
    assert isinstance(one, Result)
    for name in ("dp2", "tp2", "pp2", "cp2 divided"):
        result = ranks[name]
        assert isinstance(result, Result), result
        assert difference(result, one).weight < 1e-4, name


def test_master_weights_of_every_layout_are_those_of_one_process(tmp_path: Path) -> None:
    """Rounded to nearest: in other layouts a weight between two values may go to the other one, an eighth away."""
    words = [*BASE, "quant.optimizer.master={format: fp8_e4m3, feedback: true}"]
    words += ["training.iterations=3", "training.lr=3e-3", "training.warmup_iterations=0"]
    ranks = results(
        {
            "one": Case(words, 1),
            "dp2": Case(words, 2),
            "dp2 divided": Case([*words, DIVIDED], 2),
            "tp2": Case([*words, "parallel.tensor=2"], 2),
            "pp2": Case([*words, "parallel.pipeline=2"], 2),
            "own amax": Case([*words, DIVIDED], 2, PLANT + "amax_of_own_range"),
        },
        tmp_path / "cases",
    )
    assert equal(ranks["dp2 divided"], ranks["dp2"])
    assert "optimizer.master.w of " in str(ranks["own amax"])
    one = ranks["one"]
    assert isinstance(one, Result)
    for name in ("dp2", "tp2", "pp2"):
        result = ranks[name]
        assert isinstance(result, Result), result
        differ = [(a - one.weights[key]).abs() for key, a in result.weights.items()]
        assert sum(int((d > 1e-6).sum()) for d in differ) < 1e-3 * sum(d.numel() for d in differ)


def test_pulls_and_smoothed_gradients_of_every_layout_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    """In other layouts a weight between two values may be pulled to the other one, by 1e-3 of the distance a step."""
    words = [*BASE, "quant.optimizer.pull={format: nvfp4, strength: 1, start: 0}"]
    words += ["quant.optimizer.smooth={format: mxfp8, strength: 10000}"]
    words += ["training.iterations=3", "training.lr=1e-3", "training.warmup_iterations=0"]
    ranks = results(
        {
            "one": Case(words, 1),
            "without": Case([*words, "quant.optimizer.pull.strength=1e-9"], 1),
            "dp2": Case(words, 2),
            "dp2 divided": Case([*words, DIVIDED], 2),
            "tp2": Case([*words, "parallel.tensor=2", "parallel.unaligned=accept"], 2),
            "pp2": Case([*words, "parallel.pipeline=2"], 2),
            "own blocks": Case([*words, DIVIDED], 2, PLANT + "blocks_of_own_range"),
        },
        tmp_path / "cases",
    )
    assert equal(ranks["dp2 divided"], ranks["dp2"])
    assert not equal(ranks["own blocks"], ranks["dp2"])
    one = ranks["one"]
    assert isinstance(one, Result)
    without = ranks["without"]
    assert isinstance(without, Result)
    assert difference(without, one).weight > 1e-5
    for name in ("dp2", "tp2", "pp2"):
        result = ranks[name]
        assert isinstance(result, Result), result
        assert difference(result, one).weight < 1e-4, name


def test_resets_of_every_layout_are_those_of_one_process(tmp_path: Path) -> None:
    """Blocks of 16 that ranges of ranks cut; in other layouts a path may pass the ratio by a last bit."""
    words = [
        *BASE,
        "quant.optimizer.reset={format: nvfp4, every: 4, over: 2, ratio: 1.5, start: 0}",
    ]
    words += ["training.iterations=7", "training.lr=3e-3", "training.warmup_iterations=0"]
    tensor = ["parallel.tensor=2", "parallel.unaligned=accept"]
    ranks = results(
        {
            "one": Case(words, 1),
            "without": Case([*words, "quant.optimizer.reset.start=0.9"], 1),
            "dp2": Case(words, 2),
            "dp2 divided": Case([*words, DIVIDED], 2),
            "tp2": Case([*words, *tensor], 2),
            "pp2": Case([*words, "parallel.pipeline=2"], 2),
        },
        tmp_path / "cases",
    )
    assert equal(ranks["dp2 divided"], ranks["dp2"])
    one = ranks["one"]
    assert isinstance(one, Result)

    def differing(name: str) -> float:
        result = ranks[name]
        assert isinstance(result, Result), result
        differ = [(a - one.weights[key]).abs() for key, a in result.weights.items()]
        return sum(int((d > 1e-5).sum()) for d in differ) / sum(d.numel() for d in differ)

    assert differing("without") > 0.02
    for name in ("dp2", "tp2", "pp2"):
        assert differing(name) < 1e-3, name


def mxfp8(x: Tensor) -> Tensor:
    """E4M3 under 2^ceil(log2(amax / 448)) of blocks of 32 along the rows, by torch's float8 (arXiv 2506.08027)."""
    matrix = x if x.ndim == 2 else x[None]
    parts = []
    for part in matrix.split(32, dim=1):
        amax = part.abs().amax(dim=1, keepdim=True)
        scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
        scale[amax == 0] = 1
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, dim=1).view(x.shape)


def test_gradients_are_rounded_once_or_at_each_hop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    words = [*BASE, "quant.grad_reduce.format=mxfp8"]
    expected = {
        "once": lambda own: sum(mxfp8(g) for g in own),
        "each_hop": lambda own: mxfp8(mxfp8(own[0]) + own[1]) + own[2],
    }
    three = "training.global_batch_size=3"
    for at, mean in expected.items():
        case = Case([*words, f"quant.grad_reduce.at={at}", three], 3, PLANT + "keep_own_gradients")
        (result,) = run_all([case], tmp_path / at)
        assert isinstance(result, Result), result
        own = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
        assert len(result.gradients) > 20
        for name, gradient in result.gradients.items():
            shares = [rank[name] * (1 / 3) for rank in own]
            # The order in which gloo adds three numbers is its own: two roundings of float32.
            most = 3e-7 * sum(float(share.abs().max()) for share in shares)
            torch.testing.assert_close(gradient, mean(shares), rtol=0, atol=most)
        for rank in range(3):
            (tmp_path / f"{rank}.pt").unlink()


@pytest.mark.parametrize("at", ["once", "each_hop"])
def test_a_distributed_optimizer_reduces_the_same_rounded_gradients(
    tmp_path: Path, at: str
) -> None:
    """Two ranks add in one order, so the reduce-scatter of the default equals an all-reduce."""
    words = [*BASE, "quant.grad_reduce.format=fp8_e4m3", f"quant.grad_reduce.at={at}"]
    words += ["quant.grad_reduce.rounding=stochastic", "training.iterations=2"]
    cases = {"whole": Case(words, 2), "divided": Case([*words, DIVIDED], 2)}
    ranks = results(cases, tmp_path / "cases")
    assert equal(ranks["divided"], ranks["whole"])


def test_gradient_scaled_by_a_part_of_it_is_noticed(tmp_path: Path) -> None:
    words = [*BASE, "quant.grad_reduce.format=fp8_e4m3", "parallel.tensor=2"]
    (result,) = run_all([Case(words, 4, PLANT + "amax_of_own_part")], tmp_path / "case")
    assert "grad_reduce.once.dw of " in str(result)
    assert "its scale is that of an amax of" in str(result)


@pytest.mark.parametrize(
    ("at", "fault", "words"),
    [
        ("once", "nothing_rounded", "are not those of its source: it is not quantised"),
        ("once", "rounded_beside", "are not those of its source: it is not quantised"),
        ("once", "nothing_sent", "no collective has sent it"),
        ("each_hop", "nothing_rounded", "are not those of its source: it is not quantised"),
    ],
)
def test_gradients_that_are_sent_otherwise_than_declared_are_noticed(
    tmp_path: Path, at: str, fault: str, words: str
) -> None:
    scheme = ["quant.grad_reduce.format=mxfp8", f"quant.grad_reduce.at={at}"]
    (result,) = run_all([Case([*BASE, *scheme], 2, PLANT + fault)], tmp_path / "case")
    assert isinstance(result, str)
    assert f"grad_reduce.{at}.dw of " in result
    assert words in result
