"""Every code is decoded and encoded, and a wrong one is detected."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.extras.verify.codes import decode_every_code, encode_every_code
from quantexp.extras.verify.exact import KINDS
from quantexp.extras.verify.gold_check import GOLD
from quantexp.extras.verify.grids import grid
from quantexp.extras.verify.kernels import KERNELS, Kernel
from quantexp.extras.verify.oracles import find_oracles
from quantexp.extras.verify.tally import Row, Tally
from quantexp.formats import decode, encode

ORACLES, _ = find_oracles()
with_codes = pytest.mark.parametrize("fmt", [fmt for fmt in KINDS if fmt != "bf16"])


def rows(fmt: str, kernel: Kernel) -> dict[str, Row]:
    tally = Tally()
    decode_every_code(fmt, kernel, "cpu", "mine", ORACLES, tally)
    encode_every_code(fmt, kernel, "cpu", (fmt, "mine", GOLD), tally)
    return {row.oracle: row for row in tally.rows}


@with_codes
def test_every_code_of_the_reference_is_right_at_every_scale(fmt: str) -> None:
    by_oracle = rows(fmt, KERNELS[0])
    assert not any(row.mismatches for row in by_oracle.values())
    scales = {"mx": 256, "nv": 4 * 128, "flat": 4}[KINDS[fmt][0]]
    codes = 2 * grid(KINDS[fmt][1]).sign_bit
    assert by_oracle[GOLD].cases > 3 * scales * codes
    assert len(by_oracle) >= 2
    assert all(row.cases == scales * codes for name, row in by_oracle.items() if name != GOLD)


@with_codes
def test_one_code_that_is_decoded_wrongly_is_detected_by_all(fmt: str) -> None:
    def wrong(codes: Tensor, scales: Any, name: str, **options: Any) -> Tensor:
        y = decode(codes, scales, name, **options)
        return torch.where(codes == 5, -y, y) if codes.shape == y.shape else y

    by_oracle = rows(fmt, dataclasses.replace(KERNELS[0], decode=wrong))
    assert len(by_oracle) >= 2
    assert all(row.mismatches for row in by_oracle.values())


@with_codes
def test_one_code_that_is_encoded_wrongly_is_detected(fmt: str) -> None:
    def wrong(x: Tensor, name: str, **options: Any) -> tuple[Tensor, Any]:
        codes, scales = encode(x, name, **options)
        return torch.where(codes == 5, 4, codes), scales

    by_oracle = rows(fmt, dataclasses.replace(KERNELS[0], encode=wrong))
    assert by_oracle[GOLD].mismatches > 0


@pytest.mark.parametrize("fmt", ["mxfp4_e2m1", "nvfp4_e2m1"])
def test_bytes_whose_halves_are_swapped_are_detected(fmt: str) -> None:
    def wrong(codes: Tensor, scales: Any, name: str, **options: Any) -> Tensor:
        if options.get("packed"):
            codes = codes << 4 | codes >> 4
        return decode(codes, scales, name, **options)

    assert rows(fmt, dataclasses.replace(KERNELS[0], decode=wrong))[GOLD].mismatches > 0
