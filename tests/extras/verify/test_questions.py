"""The cases cover every option."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from quantexp.extras.verify import cases
from quantexp.extras.verify.exact import KINDS, Case
from quantexp.extras.verify.questions import SEVERAL_CHUNKS, cases_of
from quantexp.formats import FORMATS, Rounding, ScaleRule, Scaling, layout, resolve
from quantexp.formats.spec import check_amax, check_draw

formats = pytest.mark.parametrize("fmt", FORMATS)


@cache
def all_cases(fmt: str) -> list[Case]:
    return list(cases_of(fmt))


def values(fmt: str, option: str) -> set[object]:
    return {case.options.get(option) for case in all_cases(fmt)}


@formats
def test_every_option_of_every_format_is_covered_and_no_other(fmt: str) -> None:
    covered = {name for case in all_cases(fmt) for name in case.options}
    allowed = FORMATS[fmt].options
    assert covered == allowed
    for case in all_cases(fmt):
        of_call = {"amax", "seed", "offset"}
        spec = resolve(fmt, **{k: v for k, v in case.options.items() if k not in of_call})
        check_amax(spec, "amax" in case.options)
        check_draw(spec, case.options.get("seed"), case.options.get("offset"))


@formats
def test_every_choice_of_every_option_is_covered(fmt: str) -> None:
    choices = {
        "scale_rule": set(ScaleRule),
        "rounding": set(Rounding),
        "scaling": set(Scaling),
        "saturate": {True, False},
        "pre_scale": {True},
    }
    for option in FORMATS[fmt].options & set(choices):
        assert values(fmt, option) >= {getattr(c, "value", c) for c in choices[option]}, option  # type: ignore[attr-defined]


@formats
def test_every_16_bit_value_every_dtype_axis_and_layout_is_covered(fmt: str) -> None:
    assert {case.dtype for case in all_cases(fmt)} == {"float32", "bfloat16", "float16"}
    assert {case.axis for case in all_cases(fmt)} == {-2, -1, 0, 1, 2}
    assert any(case.strided for case in all_cases(fmt))
    assert any(case.packed for case in all_cases(fmt)) is (KINDS[fmt][1] == "e2m1")
    for dtype in ("bfloat16", "float16"):
        whole = [c for c in all_cases(fmt) if c.dtype == dtype and c.x.size == 1 << 16]
        bits = np.sort(cases.every_value(dtype).view(np.uint32))
        assert any(np.array_equal(np.sort(c.x.reshape(-1).view(np.uint32)), bits) for c in whole)


@formats
def test_a_tensor_of_several_chunks_on_two_threads_is_covered(fmt: str) -> None:
    assert max(case.x.size for case in all_cases(fmt)) > 2 * layout._CPU_CHUNK
    assert 32 * SEVERAL_CHUNKS > 2 * layout._CPU_CHUNK


@formats
def test_values_are_representable_in_their_dtype(fmt: str) -> None:
    for case in all_cases(fmt):
        assert case.x.dtype == np.float32
        rounded = cases.as_dtype(case.x, case.dtype)
        assert np.array_equal(rounded, case.x, equal_nan=True)
