"""Negative controls: a kernel with one defect is detected, and a correct one is not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.extras.verify import suite
from quantexp.extras.verify.exact import Case
from quantexp.extras.verify.kernels import KERNELS, Kernel, Placed
from quantexp.extras.verify.oracles import find_oracles
from quantexp.extras.verify.suite import TRANSFORM, check_case, place, verify
from quantexp.extras.verify.tally import Row, Tally
from quantexp.formats import decode, encode, hadamard, quantise
from quantexp.formats.encoding import TwoLevelScales

GOOD = KERNELS[0]
ORACLES, _ = find_oracles()
#: Stride over the cases of a format; not a multiple of the cases of one rounding.
STRIDE = 29


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the cases, without comparing the gold with Fractions (see `test_exact`)."""
    whole = suite.cases_of  # type: ignore[attr-defined]

    def some(fmt: str) -> Iterator[Case]:
        return itertools.islice(whole(fmt), 0, None, STRIDE)

    monkeypatch.setattr(suite, "cases_of", some)
    monkeypatch.setattr(suite, "check_gold", lambda *_: None)


def rows(subject: str, kernel: Kernel) -> list[Row]:
    return verify([subject], [Placed(kernel, "cpu")], ORACLES, lambda *_: None).rows


def wrong(table: list[Row]) -> set[str]:
    """The oracles that detected something."""
    return {row.oracle for row in table if row.mismatches}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("subject", ["mxfp4_e2m1", "nvfp4_e2m1", "fp8_e4m3", "hifp8", TRANSFORM])
def test_the_reference_agrees_with_every_oracle(subject: str) -> None:
    table = rows(subject, GOOD)
    assert wrong(table) == set()
    assert "exact gold" in {row.oracle for row in table}
    assert all(row.cases > 1000 for row in table)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("subject", ["mxfp4_e2m1", "fp8_e4m3", "hifp8"])
def test_the_compiled_kernel_agrees_with_every_oracle(subject: str) -> None:
    table = rows(subject, next(kernel for kernel in KERNELS if kernel.name == "compiled"))
    assert wrong(table) == set()
    assert "exact gold" in {row.oracle for row in table}
    assert all(row.cases > 1000 for row in table)


def rounds_away(x: Tensor, fmt: str, **options: Any) -> Tensor:
    if options.get("rounding", "even") == "even" and fmt != "bf16":
        options["rounding"] = "away"
    return quantise(x, fmt, **options)


def one_element_off(x: Tensor, fmt: str, **options: Any) -> Tensor:
    """The last finite nonzero value, changed by one bit."""
    y = quantise(x, fmt, **options).contiguous()
    flat = y.view(-1)
    (there,) = torch.nonzero(flat.isfinite() & (flat != 0), as_tuple=True)
    if len(there):
        bits = flat.view(torch.int32 if y.dtype == torch.float32 else torch.int16)
        bits[there[-1]] += 1
    return y


def twice(x: Tensor, fmt: str, **options: Any) -> Tensor:
    return quantise(x, fmt, **options) * 2


def other_draw(x: Tensor, fmt: str, **options: Any) -> Tensor:
    if options.get("rounding") == "stochastic":
        options["offset"] = options.get("offset", 0) + 1
    return quantise(x, fmt, **options)


def flushes_subnormals(x: Tensor, fmt: str, **options: Any) -> Tensor:
    y = quantise(x, fmt, **options)
    return torch.where(y.abs() < torch.finfo(y.dtype).tiny, torch.zeros_like(y), y)


def loses_the_sign_of_zero(x: Tensor, fmt: str, **options: Any) -> Tensor:
    return quantise(x, fmt, **options) + 0.0


def always_along_the_last_axis(x: Tensor, fmt: str, **options: Any) -> Tensor:
    return quantise(x, fmt, **{**options, "axis": -1})


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("subject", ["mxfp4_e2m1", "nvfp4_e2m1", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("fault", "others"),
    [
        (rounds_away, {"ml_dtypes", "gfloat"}),
        (one_element_off, {"ml_dtypes", "gfloat"}),
        (twice, {"ml_dtypes", "gfloat"}),
        (other_draw, set()),
        (loses_the_sign_of_zero, {"ml_dtypes"}),
    ],
)
def test_a_faulty_quantise_is_caught(
    subject: str, fault: Callable[..., Tensor], others: set[str]
) -> None:
    table = rows(subject, dataclasses.replace(GOOD, quantise=fault))
    assert wrong(table) >= {"exact gold", *others}
    assert all(row.examples for row in table if row.mismatches)


@pytest.mark.usefixtures("few")
def test_subnormals_that_are_flushed_and_a_wrong_axis_are_caught() -> None:
    for fault in (flushes_subnormals, always_along_the_last_axis):
        assert "exact gold" in wrong(rows("mxfp8_e4m3", dataclasses.replace(GOOD, quantise=fault)))


def scale_one_off(x: Tensor, fmt: str, **options: Any) -> tuple[Tensor, Any]:
    codes, scales = encode(x, fmt, **options)
    if isinstance(scales, TwoLevelScales):
        return codes, TwoLevelScales(scales.block ^ 1, scales.tensor)
    return codes, scales ^ 1 if scales.dtype == torch.uint8 else scales * 2


def sign_lost(x: Tensor, fmt: str, **options: Any) -> tuple[Tensor, Any]:
    codes, scales = encode(x, fmt, **options)
    return codes & 0x77, scales


def halves_swapped(x: Tensor, fmt: str, **options: Any) -> tuple[Tensor, Any]:
    codes, scales = encode(x, fmt, **options)
    return (codes << 4 | codes >> 4 if options.get("packed") else codes), scales


def scale_flushed(codes: Tensor, scales: Any, fmt: str, **options: Any) -> Tensor:
    """The scale 2^-127 replaced by 2^-126, as in another library."""
    return decode(codes, scales.clamp(min=1), fmt, **options)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("subject", "part", "fault", "what"),
    [
        ("mxfp4_e2m1", "encode", scale_one_off, "scales"),
        ("nvfp4_e2m1", "encode", scale_one_off, "scales"),
        ("hifp8", "encode", scale_one_off, "scale"),
        ("mxfp4_e2m1", "encode", sign_lost, "encode"),
        ("mxfp8_e5m2", "decode", scale_flushed, "decode"),
    ],
)
def test_faulty_codes_and_scales_are_caught(
    subject: str, part: str, fault: Callable[..., Any], what: str
) -> None:
    faulty: dict[str, Any] = {part: fault}
    table = rows(subject, dataclasses.replace(GOOD, **faulty))
    assert "exact gold" in wrong(table)
    assert what in {one.what for row in table for one in row.examples}


def test_codes_packed_the_wrong_way_round_are_caught() -> None:
    case = Case("mxfp4_e2m1", np.linspace(-3, 3, 64, dtype=np.float32)[None], packed=True)
    tally = Tally()
    check_case(case, [Placed(GOOD, "cpu")], [], tally)
    assert tally.mismatches == 0
    bad = dataclasses.replace(GOOD, encode=halves_swapped)
    check_case(case, [Placed(bad, "cpu")], [], tally)
    assert tally.mismatches > 0


def test_a_faulty_transform_is_caught() -> None:
    def other_side(x: Tensor, *, left: bool, **options: Any) -> Tensor:
        return hadamard(x, left=not left, **options)

    assert wrong(rows(TRANSFORM, dataclasses.replace(GOOD, hadamard=other_side))) == {"exact gold"}


def test_a_kernel_runs_only_the_cases_that_it_claims() -> None:
    only = dataclasses.replace(GOOD, name="other", formats=frozenset({"hifp8"}))
    case = Case("bf16", np.ones(3, np.float32))
    tally = Tally()
    check_case(case, place(["cpu"], [GOOD, only]), [], tally)
    assert {row.kernel for row in tally.rows} == {"reference (cpu)"}


def test_kernels_are_placed_where_they_run() -> None:
    cpu_only = dataclasses.replace(GOOD, name="c", devices=("cpu",))
    placed = place(["cpu", "cuda"], [GOOD, cpu_only])
    assert [p.label for p in placed] == ["reference (cpu)", "reference (cuda)", "c (cpu)"]


def test_an_absent_kernel_runs_no_case(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compiled (cpu)" in [p.label for p in place(["cpu"])]
    monkeypatch.setattr("quantexp.formats.kernels.cpu.functions", lambda: None)
    assert "compiled (cpu)" not in [p.label for p in place(["cpu"])]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_reference_on_a_gpu_agrees_with_every_oracle() -> None:
    tally = verify(suite.SUBJECTS, place(["cuda"]), ORACLES, lambda *_: None)
    assert tally.mismatches == 0, [row.examples for row in tally.rows if row.mismatches]
