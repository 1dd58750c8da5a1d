"""A product in parts: the stated amax is compared with that of the parts."""

from __future__ import annotations

import torch

from quantexp.proof.grids import Status
from quantexp.proof.verdict import Parts
from quantexp.proof.watch import narrowed


def seen(*amaxes: float) -> Parts:
    parts = Parts()
    for amax in amaxes:
        parts.observe(torch.tensor(amax))
    return parts


def test_amax_that_is_that_of_all_parts_is_no_finding() -> None:
    assert seen(0.25, 3.0, 1.0).mismatch(torch.tensor(3.0)) is None


def test_amax_of_another_tensor_is_a_mismatch() -> None:
    for told in (1.0, 4.0):
        finding = seen(0.25, 3.0, 1.0).mismatch(torch.tensor(told))
        assert finding is not None
        assert finding.status is Status.MISMATCH
        assert (
            finding.reason
            == f"its scale is that of an amax of {told:g}, and its parts have one of 3"
        )


def test_what_was_widened_is_judged_as_it_was() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(narrowed(x.float(), torch.bfloat16), x)
    assert narrowed(x.float(), torch.bfloat16).dtype == torch.bfloat16


def test_what_needs_float32_stays_so() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-20])
    assert narrowed(x, torch.bfloat16) is x
