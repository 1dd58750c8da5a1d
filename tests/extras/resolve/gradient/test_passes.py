"""The gradients of a checkpoint: compared with their definitions, those of training, and proved."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantexp.config.load import from_plain, plain, save
from quantexp.extras.resolve.gradient.passes import run_gradients
from quantexp.launch.replays import origin_of, replayed, trained_experiment
from quantexp.model.checkpoints import folder_of
from quantexp.quant.precision import unquantised
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from tests.conftest import run_here
from tests.recorded import json_lines

WORDS = ("capture=off", "training.iterations=6")
START, BATCHES = 2, 3
Measure = Callable[..., tuple[dict[str, Any], RunDir]]
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def trained(run_tiny_once: Callable[..., RunDir]) -> RunDir:
    return run_tiny_once(*WORDS, "checkpoint.every=2", "checkpoint.optimizer=true")


@pytest.fixture
def measure(trained: RunDir, tiny: Callable[..., Experiment], tmp_path: Path) -> Measure:
    def run(*words: str, draws: int = 1, by: tuple[str, ...] = ()) -> tuple[dict[str, Any], RunDir]:
        origin = origin_of(trained, trained_experiment(trained), START, None)
        experiment = replayed(origin, START + BATCHES, tmp_path)
        experiment.quant = tiny(*words).quant
        folder = RunDir(tmp_path / "arm")
        folder.root.mkdir(exist_ok=True)
        save(from_plain(plain(experiment)), folder.config)
        arms = [{"name": "arm", "checkpoint": START}]
        ((name, content),) = run_gradients(tmp_path, arms, BATCHES, draws, list(by))
        assert name == "arm"
        return content, folder

    return run


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The gradients that the passes leave, the reference, and the weights of the models."""
    from quantexp.training.megatron.without_te import import_megatron

    import_megatron()
    from quantexp.extras.resolve.gradient import errors, passes
    from quantexp.training.gradients import gradient_of

    content: dict[str, Any] = {"own": [], "weights": []}
    add, reference_of = errors.Errors.add, errors.reference_of

    def arrays(parts: Any, of: Callable[[Any], Any]) -> Arrays:
        return {name: of(part).detach().float().numpy().copy() for name, part in parts.items()}

    def seeing(self: Any, k: int) -> None:
        content["own"].append((k, arrays(self._parts, gradient_of)))
        content["weights"].append(arrays(self._parts, lambda part: part.tensor))
        add(self, k)

    def seeing_reference(stepper: Any, of_batches: Any) -> Any:
        content["reference"] = [
            {name: x.numpy().copy() for name, x in each.items()} for each in of_batches
        ]
        content["reference_weights"] = arrays(stepper.parts, lambda part: part.tensor)
        return reference_of(stepper, of_batches)

    monkeypatch.setattr(errors.Errors, "add", seeing)
    monkeypatch.setattr(errors, "reference_of", seeing_reference)
    assert passes is not None
    return content


def moments(trained: RunDir) -> Arrays:
    """Adam's v of the checkpoint, by Megatron's names, from its files."""
    from safetensors.torch import load_file

    found: Arrays = {}
    for file in sorted(folder_of(trained, START).rglob("*.safetensors")):
        prefix = "exp_avg_sq/"
        named = ((k, v) for k, v in load_file(file).items() if k.startswith(prefix))
        found |= {k[len(prefix) :]: v.numpy() for k, v in named}
    return found


def flat(gradients: Arrays, weights: Arrays | None = None) -> np.ndarray:
    """All elements in float64."""
    each = gradients if weights is None else {k: x * weights[k] for k, x in gradients.items()}
    return np.concatenate([x.astype(np.float64).ravel() for x in each.values()])


def test_estimates_are_those_of_the_gradients(
    trained: RunDir, measure: Measure, seen: dict[str, Any]
) -> None:
    """From the gradients themselves and the checkpoint's files, by the definitions of docs/branch.md."""
    content, _ = measure("quant=linear_mxfp4")
    assert (content["failure"], [k for k, _ in seen["own"]]) == (None, list(range(BATCHES)))
    config = trained_experiment(trained).training
    reference, v = seen["reference"], moments(trained)
    norms = [np.linalg.norm(flat(r)) for r in reference]
    clipped = [
        {name: x.astype(np.float64) * min(1.0, config.clip_grad / norm) for name, x in r.items()}
        for r, norm in zip(reference, norms, strict=True)
    ]
    adam = {}
    for name, x in reference[0].items():
        square = np.mean([c[name] ** 2 for c in clipped], axis=0)
        own = config.adam_beta2 * v[name].reshape(x.shape) + (1 - config.adam_beta2) * square
        adam[name] = 1 / (np.sqrt(own / (1 - config.adam_beta2 ** (START + 1))) + config.adam_eps)
    for scaling, weights in (("raw", None), ("adam", adam)):
        whole = content["parts"][""][scaling][0]
        r = [flat(x, weights) for x in reference]
        g = [flat(x, weights) for _, x in seen["own"]]
        e = [a - b for a, b in zip(g, r, strict=True)]
        norm = np.mean([x @ x for x in r])
        pairs = [a @ b for (i, a), (j, b) in itertools.permutations(enumerate(e), 2) if i != j]
        cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(g, r, strict=True)]
        # Adam's weights are float32 here.
        near = 1e-9 if weights is None else 1e-5
        assert whole["error2"] == pytest.approx(np.mean([x @ x for x in e]) / norm, rel=near)
        assert whole["bias2"] == pytest.approx(np.mean(pairs) / norm, rel=10 * near, abs=1e-9)
        assert whole["cosine"] == pytest.approx(np.mean(cosines), abs=near)
        assert whole["draws2"] is None
        signal = np.mean([a @ b for a, b in itertools.permutations(r, 2)]) / norm
        assert content["signal"][scaling][0] == pytest.approx(signal, rel=10 * near)


def test_both_precisions_multiply_the_same_weights(measure: Measure, seen: dict[str, Any]) -> None:
    measure("quant=bf16")
    for weights in seen["weights"]:
        for name, own in weights.items():
            assert np.array_equal(own, seen["reference_weights"][name]), name


def test_the_gradients_are_those_of_the_runs_next_steps(
    trained: RunDir, measure: Measure, seen: dict[str, Any], tiny: Callable[..., Experiment]
) -> None:
    """The first batch's is that of the iteration after the checkpoint; in the scheme's run, too."""
    content, folder = measure("quant=linear_mxfp8")
    start = [f"training.start_from={trained.root}@{START}", "training.start_optimizer=true"]
    run = run_here(tiny(*WORDS, "quant=linear_mxfp8", *start, f"training.stop_after={START + 1}"))
    (line,) = json_lines(run.metrics)
    # Training rounds the norm to float32.
    norm = float(np.linalg.norm(flat(seen["own"][0][1])))
    assert norm == pytest.approx(line["grad_norm"], rel=2.0**-22)
    assert content["groups"] == ["embedding", "layer 0", "layer 1", "final norm"]
    precision = json.loads(folder.precision.read_text())
    assert precision["proved"]
    assert {entry["status"] for entry in precision["entries"]} == {"engaged"}
    assert precision["drawn"]["iterations"] == BATCHES - 1
    reference = json.loads(RunDir(folder.root.with_name("arm-fp32")).precision.read_text())
    assert reference["proved"]
    assert {entry["quantised_calls"] for entry in reference["entries"]} == {0}


def test_parts_alone_are_schemes_of_their_own(measure: Measure) -> None:
    whole, folder = measure("quant=linear_mxfp4", by=("product",))
    assert [*whole["parts"]] == ["linear.fprop", "linear.dgrad", "linear.wgrad", ""]
    alone, _ = measure("quant=more/linear_mxfp4_wgrad", by=("product",))
    assert [*alone["parts"]] == [""], "a scheme of one product has no parts"
    assert alone["parts"][""] == whole["parts"]["linear.wgrad"]
    embedding, *layers, norm = alone["parts"][""]["raw"][1:]
    bf16, _ = measure("quant=bf16")
    same = bf16["parts"][""]["raw"]
    assert (embedding, norm) == (same[1], same[-1]), "a weight gradient moves its layer alone"
    assert all(
        own["error2"] > 100 * base["error2"] for own, base in zip(layers, same[2:4], strict=True)
    )
    precision = json.loads((folder.root / "precision.json").read_text())
    assert all(each["proved"] for each in [precision, *precision["earlier"]])


def test_draws_of_a_scheme_with_random_numbers_differ_and_repeat(measure: Measure) -> None:
    one, _ = measure("quant=more/linear_mxfp4_sr_rht", draws=2)
    again, _ = measure("quant=more/linear_mxfp4_sr_rht", draws=2)
    assert one["parts"] == again["parts"]
    whole = one["parts"][""]["raw"][0]
    assert 0 < whole["draws2"] <= whole["error2"] * 1.5
    nearest, _ = measure("quant=linear_mxfp4", draws=2)
    assert nearest["parts"][""]["raw"][0]["draws2"] is None


def test_passes_that_do_not_quantise_have_no_estimate(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantexp.training.megatron.step import Stepper

    given = Stepper.set_precision
    monkeypatch.setattr(
        Stepper, "set_precision", lambda self, declared: given(self, unquantised(declared))
    )
    content, folder = measure("quant=linear_mxfp4")
    assert content["parts"] == {}
    assert "linear.fprop.x" in content["failure"]
    assert not json.loads(folder.precision.read_text())["proved"]


def test_a_later_batch_is_proved_too(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that quantise in the first batch alone."""
    from quantexp.training.megatron.step import Stepper

    given, calls = Stepper.set_precision, []

    def once(self: Any, declared: Any) -> None:
        calls.append(declared)
        is_first = not any(each is declared for each in calls[:-1])
        given(self, declared if is_first else unquantised(declared))

    monkeypatch.setattr(Stepper, "set_precision", once)
    content, _ = measure("quant=linear_mxfp4")
    assert content["parts"] == {}
    assert "linear" in content["failure"]


def test_without_adams_v_nothing_is_scaled(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    words = ("checkpoint.every=2", "checkpoint.optimizer=true", "training.optimizer=muon")
    run = run_here(tiny(*WORDS, *words))
    experiment = replayed(origin_of(run, trained_experiment(run), 2, None), 4, tmp_path)
    folder = RunDir(tmp_path / "arm")
    folder.root.mkdir()
    save(from_plain(plain(experiment)), folder.config)
    ((_, content),) = run_gradients(tmp_path, [{"name": "arm", "checkpoint": 2}], 2, 1, [])
    assert [*content["parts"][""]] == [*content["signal"]] == ["raw"]
