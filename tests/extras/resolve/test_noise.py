"""The control `noise`: the errors of a scheme, with random signs and no mean."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quantexp.config.load import from_plain, plain
from quantexp.errors import ConfigError
from quantexp.extras.resolve.mirrored import Mirrored
from quantexp.extras.resolve.noise import noisy
from quantexp.formats import quantise
from quantexp.formats.types import Family
from quantexp.quant.precision import PrecisionMap, precision_map
from quantexp.schema import Experiment

Tiny = Callable[..., Experiment]


class Mxfp4(Mirrored):
    fmt, options = "mxfp4_e2m1", {"scale_rule": "rceil"}


@pytest.fixture(autouse=True)
def _own_path() -> Iterator[None]:
    """The folder of a design stays on the path of its process alone."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def mirrored(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return Mxfp4().quantise(x, axis=-1, generator=torch.Generator().manual_seed(seed))


def test_errors_keep_their_size() -> None:
    """In float32 x and its rounded value are exact, and 2 x - Q(x) is rounded once, to 24 bits."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    error = (quantise(x, "mxfp4_e2m1", scale_rule="rceil") - x).abs()
    torch.testing.assert_close((mirrored(x) - x).abs(), error, rtol=1e-5, atol=1e-6)


def test_errors_have_no_mean() -> None:
    """Of 400 draws of one tensor: the mean is within five standard errors for each of 256 elements."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    error = (quantise(x, "mxfp4_e2m1", scale_rule="rceil") - x).abs()
    mean = torch.stack([mirrored(x, seed) for seed in range(400)]).mean(0)
    assert ((mean - x).abs() <= 5 * error / math.sqrt(400) + 1e-6).all()


def test_half_of_the_values_are_those_of_the_scheme() -> None:
    """Of 65,536 elements: four standard errors of a share of a half are 0.8 points."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
    same = mirrored(x) == quantise(x, "mxfp4_e2m1", scale_rule="rceil")
    assert same.float().mean().item() == pytest.approx(0.5, abs=0.008)


def test_what_is_not_finite_and_what_the_format_has_stay() -> None:
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    x[0, :4] = torch.tensor([1.0, -6.0, 0.5, 4.0])
    assert torch.equal(mirrored(x), x)
    x[1, 5] = math.inf
    assert mirrored(x)[1, 5].item() == math.inf
    assert mirrored(x).dtype == torch.bfloat16


def maps_of(experiment: Experiment, folder: Path) -> tuple[PrecisionMap, PrecisionMap]:
    """The maps of a scheme and of its noise, as an experiment that is read again has them."""
    own = precision_map(experiment.model, experiment.quant)
    experiment.quant = noisy(experiment.quant, experiment.model, 1, folder)
    again = from_plain(plain(experiment))
    return own, precision_map(again.model, again.quant)


@pytest.mark.parametrize(
    "words",
    [
        ["quant=linear_mxfp8"],
        ["quant=FA_linear_hifp8"],
        ["quant=more/linear_mxfp4_wgrad"],
        ["quant=linear_mxfp4", "quant.rules=[{layers: [1], format: mxfp8}]"],
        ["quant=more/linear_nvfp4"],
    ],
)
def test_the_slots_of_the_scheme_have_noise_and_no_others(
    tiny: Tiny, words: list[str], tmp_path: Path
) -> None:
    own, noise = maps_of(tiny(*words), tmp_path)
    for name, module in own.items():
        for slot, spec in module.slots.items():
            other = noise[name].slots[slot]
            assert other.quantised == spec.quantised, (name, slot)
            assert other.reuse == spec.reuse
            assert (other.fmt.family is Family.PYTHON) == spec.quantised


@pytest.mark.parametrize(
    "words",
    [
        ["quant=more/linear_mxfp4_sr_rht"],
        ["quant=more/linear_mxfp4_hadamard"],
        ["quant=more/linear_fp8_delayed"],
        ["quant=linear_mxfp4", "quant.linear.dgrad.w.of=forward"],
        ["quant=more/linear_mxfp4_outliers"],
    ],
)
def test_schemes_that_do_more_than_rounding_are_refused(
    tiny: Tiny, words: list[str], tmp_path: Path
) -> None:
    experiment = tiny(*words)
    with pytest.raises(ConfigError, match="does more than round one tensor to a shipped format"):
        noisy(experiment.quant, experiment.model, 1, tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["quant=more/adam_fp8_block"],
        ["quant=linear_mxfp4", "quant.rules=[{iterations: [1, 1], format: bf16}]"],
        ["quant=linear_mxfp4", "quant.rules=[{when: {below: 1}, format: bf16}]"],
    ],
)
def test_schemes_that_change_or_round_elsewhere_are_refused(
    tiny: Tiny, words: list[str], tmp_path: Path
) -> None:
    experiment = tiny(*words)
    with pytest.raises(ConfigError, match="values outside of products or rules of iterations"):
        noisy(experiment.quant, experiment.model, 1, tmp_path)
