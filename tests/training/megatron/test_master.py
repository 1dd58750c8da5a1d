"""Master weights in a format, and the error of their rounding in Adam's first moment (ECO, arXiv 2601.22101).

The oracle is the paper's algorithm 3 in numpy's float64, on the gradients that Adam received, and torch's own float8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantexp.model.checkpoints import STATE, folder_of
from quantexp.runs.paths import RunDir
from quantexp.runs.precision import read_precision
from quantexp.runs.status import State, read_status
from quantexp.training.megatron import finite, rounded_state
from quantexp.training.megatron.rounded_pieces import RoundedPiece
from quantexp.training.megatron.rounded_state import RoundedState
from quantexp.training.megatron.state_shards import Held

from .test_moments import close_to_a_grid_point, fp8_in_blocks

RunTiny = Callable[..., RunDir]
Tensors = dict[str, Tensor]
MASTER = "quant.optimizer.master"
#: Rates, betas, eps and decay of the runs below.
LR, B1, B2, EPS, DECAY = 3e-3, 0.9, 0.95, 1e-8, 0.1
RUN = [
    *("quant=bf16", "capture=off", "training.iterations=3", "training.warmup_iterations=0"),
    *(f"training.lr={LR}", "training.lr_schedule=constant", f"{MASTER}.format=fp8_1x128"),
    *("checkpoint.every=1", "checkpoint.optimizer=true"),
]


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and any(
        part in name for part in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    )


def state(run: RunDir, iteration: int) -> Tensors:
    return load_file(folder_of(run, iteration) / STATE / "rank00000.safetensors")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensors, Tensors]]:
    """The main weights before each step, and the gradients with which Adam makes it."""
    steps: list[tuple[Tensors, Tensors]] = []
    plain = RoundedState.around_step

    @contextlib.contextmanager
    def around_step(self: RoundedState, *args: Any) -> Iterator[None]:
        held = self._held.items()
        gradients = {name: each.main.grad.clone() for name, each in held}
        steps.append(({name: each.main.detach().clone() for name, each in held}, gradients))
        with plain(self, *args):
            yield

    monkeypatch.setattr(RoundedState, "around_step", around_step)
    return steps


def eco(
    w: Tensor, g: Tensor, m: np.ndarray, v: np.ndarray, t: int, feedback: bool
) -> tuple[Tensor, Callable[[Tensor], np.ndarray], np.ndarray]:
    """Algorithm 3: the weight before it is rounded, the first moment for one that is, and the second moment."""
    own, gradient = w.double().numpy(), g.double().numpy()
    m = B1 * m + (1 - B1) * gradient
    v = B2 * v + (1 - B2) * gradient**2
    m_hat, v_hat = m / (1 - B1**t), v / (1 - B2**t)
    decay = DECAY if w.ndim == 2 else 0.0  # Megatron's: not of norms
    moved = own - LR * (m_hat / (np.sqrt(v_hat) + EPS) + decay * own)

    def moment(rounded: Tensor) -> np.ndarray:
        if not feedback:
            return m
        error = moved - rounded.double().numpy()
        return m + (1 - B1**t) / LR * (1 - 1 / B1) * (np.sqrt(v_hat) + EPS) * error

    return torch.from_numpy(moved).float(), moment, v


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("feedback", [True, False])
def test_steps_are_those_of_the_papers_algorithm(
    run_tiny: RunTiny, steps: list[tuple[Tensors, Tensors]], precision: str, feedback: bool
) -> None:
    """From one checkpoint to the next: torch's AdamW rounds each operation to float32, ours only the results."""
    run = run_tiny(*RUN, f"{MASTER}.feedback={feedback}", f"training.precision={precision}")
    before: Tensors = {}
    linear = [name for name in steps[0][0] if is_linear(name)]
    assert len(linear) == 8
    for t in (1, 2, 3):
        after = state(run, t)
        stored, gradients = steps[t - 1]
        for name in stored:
            w = stored[name]
            if before:
                assert torch.equal(w.view(-1), before[f"main/{name}"].view(-1)), name
            m, v = (
                before[f"{kind}/{name}"].view(w.shape).double().numpy()
                if before
                else np.zeros(w.shape)
                for kind in ("exp_avg", "exp_avg_sq")
            )
            is_rounded = name in linear
            moved, moment, v = eco(w, gradients[name], m, v, t, feedback and is_rounded)
            own = after[f"main/{name}"].view(w.shape)
            if is_rounded:
                assert close_to_a_grid_point(own, fp8_in_blocks(moved)), name
                assert not torch.equal(own, moved)
            else:
                torch.testing.assert_close(own, moved, rtol=1e-6, atol=1e-9)
            # The error of a weight of 0.1 is known to 1e-8 here, and the factor 1 / lr makes 1e-5 of the moment of it.
            scale = float(np.abs(moment(own)).max())
            actual = after[f"exp_avg/{name}"].view(w.shape).double().numpy()
            np.testing.assert_allclose(actual, moment(own), rtol=1e-4, atol=1e-4 * scale)
            actual = after[f"exp_avg_sq/{name}"].view(w.shape).double().numpy()
            np.testing.assert_allclose(actual, v, rtol=1e-5, atol=1e-12)
        before = after


def test_proof_and_map_name_the_master_weights(run_tiny: RunTiny) -> None:
    words = [f"{MASTER}.feedback=true", f"{MASTER}.parameters=all", "training.precision=fp16"]
    run = run_tiny(*RUN, *words, "quant.optimizer.exp_avg.format=mxfp8")
    record = read_precision(run.precision)
    assert record["proved"]
    entries: list[dict[str, Any]] = [dict(entry) for entry in record["entries"]]
    first, second = (e for e in entries if e["site"] == "optimizer")
    keys = ("module", "product", "operand", "format", "status")
    assert [first[k] for k in keys] == ["all parameters", "master", "w", "fp8_1x128", "engaged"]
    assert first["feedback"]
    assert [second[k] for k in keys[1:]] == ["adam", "exp_avg", "mxfp8_e4m3", "engaged"]


def _hidden_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer goes on with weights in float32; what is stored are rounded copies of them."""
    hidden: Tensors = {}
    begin, around = RoundedState.begin, RoundedState.around_step

    def keep(self: RoundedState, *args: Any) -> None:
        hidden.update({name: held.main.detach().clone() for name, held in self._held.items()})
        begin(self, *args)

    @contextlib.contextmanager
    def go_on(self: RoundedState, *args: Any) -> Iterator[None]:
        with around(self, *args):
            for name, held in self._held.items():
                held.main.data.copy_(hidden[name])
            yield

    monkeypatch.setattr(RoundedState, "begin", keep)
    monkeypatch.setattr(RoundedState, "around_step", go_on)


def _after_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model gets the weights before they are rounded."""

    def step(optimizer: Any, around: Any) -> bool:
        with around:
            return bool(optimizer.step_with_ready_grads())

    monkeypatch.setattr(finite, "_step", step)


def _of(change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    plain = rounded_state.with_error

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            rounded_state, "with_error", lambda m, v, e, step: change(plain, m, v, e, step)
        )

    return plant


def _without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundedPiece, "round", lambda *args: None)


def _a_copy_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Held.moment
    monkeypatch.setattr(Held, "moment", lambda held, kind: plain(held, kind).clone())


ERROR = "of the first moment are not those with the error of rounding"


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_without_rounding, "are not those of its source: it is not quantised"),
        (_hidden_weights, "weights are not AdamW's step from those that were stored"),
        (_after_the_copy, "weights of the model are not the master weights"),
        (_of(lambda plain, m, *others: m), ERROR),
        (_of(lambda plain, m, v, e, step: plain(m, v, -e, step)), ERROR),
        (_of(lambda plain, m, v, e, step: plain(m, m.square(), e, step)), ERROR),
        (_a_copy_is_changed, ERROR),
    ],
    ids=[
        "not rounded",
        "hidden weights",
        "after the copy",
        "not added",
        "other sign",
        "another root",
        "a copy",
    ],
)
def test_a_fault_is_named(
    run_tiny: RunTiny,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    words: str,
) -> None:
    plant(monkeypatch)
    run = run_tiny(*RUN, f"{MASTER}.feedback=true", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "optimizer.master.w of " in str(status.reason)
    assert words in str(status.reason)


def test_a_fault_that_begins_later_is_named_when_its_parameter_is_drawn(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of linear layers are 8 of the 14 parameters: by iteration 22 all but 2 in 10^8 runs draw one of them."""
    _of(lambda plain, m, v, e, step: m if step.steps > 2 else plain(m, v, e, step))(monkeypatch)
    run = run_tiny(*RUN, f"{MASTER}.feedback=true", "training.iterations=22", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert "optimizer.master.w of decoder.layers." in str(status.reason)
    assert read_precision(run.precision)["failures"]


def test_muon_moves_weights_that_stay_in_a_format(run_tiny: RunTiny) -> None:
    run = run_tiny(*RUN, "training.optimizer=muon")
    assert read_precision(run.precision)["proved"]
    for name, own in state(run, 3).items():
        if name.startswith("main/") and is_linear(name):
            assert torch.equal(own, fp8_in_blocks(own)), name
