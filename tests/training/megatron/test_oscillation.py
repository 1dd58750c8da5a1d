"""Weights that oscillate between two values of a format are reset to one of them (OsciReset, arXiv 2510.27527).

The oracle adds up the paths as the paper defines them, in numpy, with E4M3 by torch's own float8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.runs.paths import RunDir
from quantexp.runs.precision import read_precision
from quantexp.runs.status import State, read_status
from quantexp.training.megatron import rounded_state
from quantexp.training.megatron.oscillation import Phase, follow, phase_of

from .test_moments import fp8_in_blocks

RunTiny = Callable[..., RunDir]
RESET = "quant.optimizer.reset"
#: Notes weights after iteration 8, observes 9 to 11, and resets after 12.
RUN = [
    *("quant=bf16", "capture=off", "training.iterations=15", "training.warmup_iterations=0"),
    *("training.precision=fp32", "training.lr=3e-3", "training.min_lr=3e-3"),
    f"{RESET}={{format: fp8_1x128, every: 8, over: 3, ratio: 1.25, start: 0.3}}",
]


def assert_map_and_proof_name_the_resets(run: RunDir) -> None:
    record = read_precision(run.precision)
    assert record["proved"]
    assert record["iteration"] == 12
    entries: list[dict[str, Any]] = [dict(entry) for entry in record["entries"]]
    entry = next(e for e in entries if e["site"] == "optimizer")
    assert [entry[k] for k in ("module", "product", "operand", "format", "status", "ratio")] == [
        *("linear weights", "reset", "w", "fp8_1x128", "engaged", 1.25)
    ]
    (first,) = record["earlier"]  # type: ignore[typeddict-item]
    entries = [e for e in first["entries"] if e["site"] == "optimizer"]
    assert entries[0]["status"] == "inconclusive"
    assert entries[0]["reason"] == "the first reset is in iteration 12"


def test_weights_with_a_longer_rounded_path_are_reset_and_map_and_proof_name_it(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding of a few near ties differs by one value, an eighth, and with it the ratio of their paths."""
    plain = follow
    calls: list[tuple[Phase, Tensor, Tensor]] = []

    def recorded(phase: Phase, w: Tensor, *others: Any) -> None:
        before = w.clone()
        plain(phase, w, *others)
        calls.append((phase, before, w.clone()))

    monkeypatch.setattr(rounded_state, "follow", recorded)
    run = run_tiny(*RUN, "model.hidden_size=128", "model.ffn_hidden_size=256")
    assert_map_and_proof_name_the_resets(run)
    phases = [phase.value for phase, *_ in calls[::8]]
    assert phases == ["note", "track", "track", "track", "reset"]
    number_reset = 0
    for index in range(8):
        own = calls[index::8]
        before = np.stack([w.numpy() for _, w, _ in own])
        rows = [fp8_in_blocks(torch.from_numpy(w).view(-1, 128)).view(-1).numpy() for w in before]
        rounded = np.stack(rows)
        path = np.abs(np.diff(before[:4], axis=0)).sum(0)
        rounded_path = np.abs(np.diff(rounded[:4], axis=0)).sum(0)
        far = rounded_path >= 1.25 * path
        expected = np.where(far, rounded[4], before[4])
        for (_, w, after), stays in zip(own, [True] * 4 + [False], strict=True):
            assert torch.equal(w, after) == stays
        assert (own[4][2].numpy() != expected).mean() < 2e-3
        number_reset += int((own[4][2] != own[4][1]).sum())
    assert number_reset > 1000


def test_a_weight_that_stands_still_is_not_reset() -> None:
    """And one that passes a threshold back and forth is, to what it is rounded to."""
    w, tracked = torch.tensor([1.2, 0.49]), dict[str, Tensor]()
    follow(Phase.NOTE, w, w.round(), tracked, 8.0)
    for value in (0.51, 0.49, 0.51):
        w[1] = value
        follow(Phase.TRACK, w, w.round(), tracked, 8.0)
    follow(Phase.RESET, w, w.round(), tracked, 8.0)
    assert w.tolist() == [pytest.approx(1.2), 1.0]
    assert not tracked


def _plant(**changed: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in changed.items():
            monkeypatch.setattr(rounded_state, name, value)

    return plant


def _never(slot: Any, iteration: int, iterations: int) -> Phase | None:
    phase = phase_of(slot, iteration, iterations)
    return None if phase is Phase.RESET else phase


def _half_a_ratio(phase: Phase, w: Any, rounded: Any, tracked: Any, ratio: float) -> None:
    follow(phase, w, rounded, tracked, ratio / 2)


def _of_the_wrong_iteration(phase: Phase, w: Any, rounded: Any, tracked: Any, ratio: float) -> None:
    """The rounded value is compared with itself, so that no path grows."""
    follow(Phase.NOTE if phase is Phase.TRACK else phase, w, rounded, tracked, ratio)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_plant(phase_of=_never), "no step has rounded it"),
        (_plant(follow=_half_a_ratio), "weights are not as they must be reset"),
        (_plant(follow=_of_the_wrong_iteration), "numbers of what was observed of them are wrong"),
        (_plant(follow=lambda *args: None), "of what was observed of them are wrong"),
    ],
    ids=["never", "another ratio", "no path", "nothing"],
)
def test_a_fault_is_named(
    run_tiny: RunTiny,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    words: str,
) -> None:
    """Observations by the drawn parameter, in the three iterations of one; resets by each."""
    plant(monkeypatch)
    run = run_tiny(*RUN, "training.seed=3", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "optimizer.reset.w" in str(status.reason)
    assert words in str(status.reason)
