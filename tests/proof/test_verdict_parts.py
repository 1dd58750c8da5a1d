"""A product in parts: the stated amax is compared with that of the parts."""

from __future__ import annotations

import torch

from quantexp.proof.comparing import narrowed
from quantexp.proof.findings import Status
from quantexp.proof.verdict import Parts


def parts_of(*amaxes: float) -> Parts:
    parts = Parts()
    for amax in amaxes:
        parts.observe(torch.tensor(amax))
    return parts


def same(amax: torch.Tensor) -> torch.Tensor:
    """The reduction of a tensor that one rank holds whole."""
    return amax


def test_amax_that_is_that_of_all_parts_is_no_finding() -> None:
    assert parts_of(0.25, 3.0, 1.0).mismatch(torch.tensor(3.0), same) is None


def test_amax_of_another_tensor_is_a_mismatch() -> None:
    for amax in (1.0, 4.0):
        finding = parts_of(0.25, 3.0, 1.0).mismatch(torch.tensor(amax), same)
        assert finding is not None
        assert finding.status is Status.MISMATCH
        assert (
            finding.reason
            == f"its scale is that of an amax of {amax:g}, and its parts have one of 3"
        )


def test_parts_on_other_ranks_count() -> None:
    def with_other_rank(amax: torch.Tensor) -> torch.Tensor:
        return torch.maximum(amax, torch.tensor(5.0))

    assert parts_of(0.25, 3.0).mismatch(torch.tensor(5.0), with_other_rank) is None
    finding = parts_of(0.25, 3.0).mismatch(torch.tensor(3.0), with_other_rank)
    assert finding is not None
    assert finding.reason.endswith("of 3, and its parts have one of 5")


def test_widened_values_are_judged_in_their_own_dtype() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(narrowed(x.float(), torch.bfloat16), x)
    assert narrowed(x.float(), torch.bfloat16).dtype == torch.bfloat16


def test_values_that_need_float32_stay_in_float32() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-20])
    same = narrowed(x, torch.bfloat16)
    assert same.dtype == torch.float32
    assert torch.equal(same, x)
