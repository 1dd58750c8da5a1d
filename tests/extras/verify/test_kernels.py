"""The tensors and options passed to a kernel, and the results read back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantexp.extras.verify.exact import Case
from quantexp.extras.verify.kernels import KERNELS, ask, packed, to_numpy, to_torch
from quantexp.formats import quantise


def test_a_case_reaches_the_kernel_unchanged() -> None:
    """Strides, dtype, options and the amax as a tensor."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def spy(x: Tensor, fmt: str, **options: Any) -> Tensor:
        calls.append((x, options))
        return quantise(x, fmt, **options)

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    case = Case("hifp8", x, "bfloat16", 0, {"scaling": "exact", "amax": 5.0}, strided=True)
    ask(dataclasses.replace(KERNELS[0], quantise=spy), "cpu", case)
    ((tensor, options),) = calls
    assert (tensor.dtype, tensor.stride()) == (torch.bfloat16, (1, 2))
    assert tensor.tolist() == x.tolist()
    assert (options["axis"], options["amax"].item(), options["amax"].shape) == (0, 5.0, ())


def test_arrays_come_back_from_torch_unchanged() -> None:
    x = np.array([1.5, -0.0, np.inf], np.float32)
    assert to_numpy(to_torch(x, "bfloat16", "cpu")).tolist() == x.tolist()
    codes = np.arange(5, dtype=np.uint8)
    assert to_numpy(to_torch(codes, "uint8", "cpu")).dtype == np.uint8


def test_a_reply_has_all_that_a_format_has() -> None:
    x = np.ones((2, 48), np.float32)
    for fmt, has in {
        "mxfp8_e4m3": (True, True, False),
        "nvfp4_e2m1": (True, True, True),
        "hifp8": (True, False, True),
        "bf16": (False, False, False),
    }.items():
        reply = ask(KERNELS[0], "cpu", Case(fmt, x))
        answer = reply.answer
        got = (answer.codes, answer.block_scales, answer.tensor_scale)
        assert tuple(part is not None for part in got) == has
        assert (reply.decoded is not None) is has[0]
        assert answer.values.tolist() == x.tolist()


def test_codes_are_packed_with_the_first_in_the_lower_half_and_an_odd_last_alone() -> None:
    codes = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)
    assert packed(codes, -1).tolist() == [[0x21, 0x03], [0x54, 0x06]]
    assert packed(codes, 0).tolist() == [[0x41, 0x52, 0x63]]
