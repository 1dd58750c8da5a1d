"""Which copies of a weight share a read, are the same tensor, and are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantexp.formats import QuantSpec
from quantexp.quant.sharing import shares_read
from quantexp.quant.sites import DGRAD_W, FPROP_W, Site
from quantexp.quant.slots import resolve_site
from quantexp.quant.weight_cache.policy import copy_key, num_kept
from quantexp.schema import LinearDgrad, LinearSite, Slot


def weights(linear: LinearSite) -> tuple[QuantSpec, QuantSpec]:
    slots = resolve_site(Site.LINEAR, linear)
    return slots[FPROP_W], slots[DGRAD_W]


def site(fmt: str, dgrad: Slot | None = None, **options: object) -> LinearSite:
    return LinearSite(format=fmt, dgrad=LinearDgrad(w=dgrad or Slot()), **options)  # type: ignore[arg-type]


#: Format, dgrad's own slot, options -> one read for both; copies with several, one recomputed, one micro-batch.
CASES = {
    "blocks along two axes": (site("mxfp8"), True, (2, 1, 1)),
    "no blocks": (site("hifp8"), True, (1, 1, 1)),
    "the forward's copy again": (site("mxfp4", Slot(format="reuse")), True, (1, 1, 1)),
    "the forward's copy quantised again": (site("mxfp4", Slot(of="forward")), False, (2, 1, 0)),
    "two formats": (site("mxfp8", Slot(format="mxfp4")), False, (2, 1, 0)),
    "two scale rules": (site("mxfp8", Slot(scale_rule="floor")), False, (2, 1, 0)),
    "fprop alone": (site("mxfp8", Slot(format="bf16")), False, (1, 1, 0)),
    "the working precision": (site("bf16"), False, (0, 0, 0)),
    "draws of their own": (site("mxfp4", rounding="stochastic"), False, (2, 1, 0)),
    "random signs": (site("mxfp4", hadamard="random"), False, (0, 0, 0)),
    "fixed signs": (site("mxfp4", hadamard="deterministic"), False, (2, 1, 0)),
    "delayed": (site("hifp8", scaling="delayed"), False, (2, 1, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_copies_are_kept_where_they_have_a_further_use(case: str) -> None:
    linear, one_read, expected = CASES[case]
    fprop, dgrad = weights(linear)
    # As in the precision map: an operand that needs the step state has a stream, each slot its own.
    first, second = (
        replace(o, stream=label if o.needs_step_state else "")
        for o, label in ((fprop, "fprop.w"), (dgrad, "dgrad.w"))
    )
    assert shares_read(first, second) is one_read
    counts = [(True, False), (False, True), (False, False)]
    assert tuple(num_kept(first, second, *count) for count in counts) == expected


def test_a_form_is_the_values_not_the_slot() -> None:
    fprop, dgrad = weights(site("hifp8"))
    assert fprop != dgrad
    assert copy_key(fprop, "") == copy_key(dgrad, "")
    assert copy_key(fprop, "a") != copy_key(fprop, "b")
    rows, columns = weights(site("mxfp8"))
    assert copy_key(rows, "") != copy_key(columns, "")
    _, again = weights(site("mxfp8", Slot(format="reuse")))
    assert copy_key(rows, "") == copy_key(again, "")
