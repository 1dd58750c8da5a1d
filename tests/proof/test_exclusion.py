"""What excludes a grid at little cost must never exclude one that the search of whole windows finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantexp.formats import local_step, quantise
from quantexp.proof.candidates import OTHERS, Grid
from quantexp.proof.exclusion import Exclusion
from quantexp.proof.grids import Status, lies_on, which_grid
from quantexp.proof.windows import windows_of
from tests.proof.test_verdict_judge import DECLARED, quantise_as

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ACTUAL = [*DECLARED, "mxfp8_e5m2", "fp8_e5m2"]


def values(dtype: torch.dtype) -> Iterator[Tensor]:
    """Of one size, of sizes by row and column, of few values, of few elements, and beyond HiF8's largest value."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(72, 160, generator=generator)
    rows = torch.randint(-12, 3, (72, 1), generator=generator)
    columns = torch.randint(-12, 3, (1, 160), generator=generator)
    yield from (
        each.to(dtype)
        for each in (
            x,
            x * torch.exp(2 * torch.randn(x.shape, generator=generator)),
            x * rows.exp2(),
            x * columns.exp2(),
            x * 2.0**14,
            x * torch.finfo(dtype).smallest_normal * 8,
            (4 * x).round() / 4,
            x.sign() * x.abs().log2().round().exp2(),
            x * (torch.rand(x.shape, generator=generator) < 0.04),
            x[:1].expand(72, 160),
        )
    )


def operands(dtype: torch.dtype) -> Iterator[Tensor]:
    """Those values in each format along either axis, in two formats, and in a format in one window only."""
    for x in values(dtype):
        for fmt in ACTUAL:
            for axis in (-1, -2):
                q = quantise_as(fmt, x, axis)
                yield q
                part = x.clone()
                part[32:64, 64:128] = q[32:64, 64:128]
                yield part
                for second in ("mxfp8", "hifp8", "mxfp4"):
                    yield quantise_as(second, q)
                    yield quantise_as(second, part)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_grid_that_the_search_finds_is_never_excluded(dtype: torch.dtype, every: int) -> None:
    excluded = found = searched = 0
    for x in itertools.islice(operands(dtype), 0, None, every):
        amax = x.abs().amax().float()
        for name, spec in DECLARED.items():
            declared = Grid(spec) if spec.quantised else None
            if (
                not amax
                or not amax.isfinite()
                or (declared is not None and declared.num_off(x, amax, -1))
            ):
                continue
            windows = windows_of(x, -1, spec.block)
            step, working = steps_of(windows, declared, amax)
            exclusion = Exclusion(declared, windows, amax, step, working)
            mantissa = torch.frexp(windows.float().abs()).mantissa
            for other in OTHERS:
                if other.format == spec.fmt.name:
                    continue
                is_found = lies_on(other, exclusion, mantissa)
                is_excluded = exclusion.excludes(other)
                assert not (is_found and is_excluded), (name, other)
                found += is_found
                excluded += is_excluded
                searched += not is_excluded and not is_found
    assert found > 1000 / every, "grids to be found are among the cases"
    assert excluded > searched, "most others are excluded"


def steps_of(windows: Tensor, declared: Grid | None, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The steps of the declared grid and of the dtype, by torch's next number."""
    magnitude = windows.abs()
    following = torch.nextafter(magnitude, torch.full_like(magnitude, torch.inf))
    working = (following.double() - magnitude.double()).float()
    return (working if declared is None else declared.step(windows, amax)), working


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", [*DECLARED])
def test_usual_operands_search_no_whole_window_or_few(
    fmt: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some pairs, only the search tells how many elements the other grid is coarser around."""
    searched: list[str] = []
    both = Grid.both

    def noted(self: Grid, x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        searched.append(self.format)
        return both(self, x, amax)

    monkeypatch.setattr(Grid, "both", noted)
    x = quantise_as(
        fmt, torch.randn(256, 512, generator=torch.Generator().manual_seed(3)).to(dtype)
    )
    spec, amax = DECLARED[fmt], x.abs().amax().float()
    declared = Grid(spec) if spec.quantised else None
    assert (
        which_grid(windows_of(x, -1, spec.block), amax, fmt, declared, amax).status
        is Status.ENGAGED
    )
    expected = {
        "mxfp4": {"nvfp4_e2m1"},
        "nvfp4": {"mxfp6_e2m3", "hifp8"},
        "hifp8": {"mxfp8_e4m3"},
    }
    assert set(searched) <= expected.get(fmt, set())


@pytest.mark.parametrize(
    "other", [each for each in OTHERS if each.spec.fmt.family in ("mx", "fp8")]
)
def test_smallest_step_is_a_bound(other: Grid) -> None:
    """Of MX it is the step of the smallest element beside amax; of a tensor scale it is at most four times that."""
    generator = torch.Generator().manual_seed(1)
    for exponent in (-100, -14, 0, 13, 100):
        amax = quantise((1 + torch.rand(1, generator=generator)) * 2.0**exponent, other.spec)[0]
        x = torch.stack([amax, torch.tensor(2.0**-149)])
        step = local_step(x, other.spec, amax=amax if other.spec.is_scaled else None)[1]
        ratio = float(other.smallest_step(amax) / step)
        assert 1.0 < ratio <= 4.0 if other.spec.is_scaled else ratio == 1.0
