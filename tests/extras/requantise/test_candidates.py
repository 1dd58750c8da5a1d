from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantexp.analysis.tensors.operands import slots_of_tensor
from quantexp.errors import ConfigError
from quantexp.extras.requantise.candidates import Candidate, candidates, formats_of
from quantexp.formats import FORMATS, Family, Hadamard, TwoLevelScales, encode, get_format
from quantexp.quant.sites import Site
from quantexp.quant.slots import resolve_site
from quantexp.schema import LinearSite

ALL = candidates(formats_of(None))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("mxfp8", 8.25),
        ("mxfp8_e5m2", 8.25),
        ("mxfp6_e2m3", 6.25),
        ("mxfp6_e3m2", 6.25),
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
        ("fp8_e4m3", 8.0),
        ("fp8_e5m2", 8.0),
        ("hifp8", 8.0),
    ],
)
def test_an_element_costs_its_code_and_its_share_of_a_scale(name: str, bits: float) -> None:
    assert {one.bits for one in candidates(formats_of([name]))} == {bits}


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4"])
def test_the_share_of_a_scale_is_what_encode_stores(name: str) -> None:
    x = torch.ones(4, 128)
    _, scales = encode(x, name)
    blocks = scales.block if isinstance(scales, TwoLevelScales) else scales
    stored = get_format(name).element.bits + 8 * blocks.numel() / x.numel()
    assert candidates(formats_of([name]))[0].bits == stored


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # rules x roundings x transforms; FP4 has a fourth rounding, stochastic after 3/4
        ("mxfp8_e4m3", 4 * 3 * 3),
        ("mxfp6_e3m2", 4 * 3 * 3),
        ("mxfp4_e2m1", 4 * 4 * 3),
        # scalings x roundings x transforms
        ("nvfp4_e2m1", 3 * 4 * 3),
        ("fp8_e5m2", 3 * 3 * 3),
        ("hifp8", 3 * 3 * 3),
    ],
)
def test_every_option_is_combined_with_every_other(name: str, count: int) -> None:
    combinations = candidates(formats_of([name]))
    assert (
        len(combinations)
        == len(set(combinations))
        == len({one.name for one in combinations})
        == count
    )


def test_the_page_has_the_number_of_candidates() -> None:
    page = Path(__file__).parents[3] / "docs" / "evaluate.md"
    assert f"That makes {len(ALL)} candidates for each slot." in page.read_text()


def test_every_format_that_quantises_has_candidates() -> None:
    quantising = {name for name, fmt in FORMATS.items() if fmt.family is not Family.BF16}
    assert {one.format.name for one in ALL} == quantising


@pytest.mark.parametrize("name", sorted({one.format.name for one in ALL}))
def test_the_first_candidate_is_the_default_of_a_scheme(name: str) -> None:
    declared = resolve_site(Site.LINEAR, LinearSite(format=name))
    slot = slots_of_tensor({"layer_type": "linear", "tensor": "input"})[0]
    assert candidates(formats_of([name]))[0].spec(slot) == declared[slot]


@pytest.mark.parametrize("candidate", ALL, ids=lambda one: one.name)
def test_settings_of_a_candidate_mean_the_same_in_a_scheme(candidate: Candidate) -> None:
    declared = resolve_site(Site.LINEAR, LinearSite(**candidate.settings()))
    for tensor in ("input", "weight", "grad_output"):
        slots = slots_of_tensor({"layer_type": "linear", "tensor": tensor})
        assert len(slots) == 2
        for slot in slots:
            spec = candidate.spec(slot)
            assert spec == declared[slot]
            assert spec.left == declared[slot].left


def test_a_name_lists_the_unusual_options() -> None:
    fmt = get_format("mxfp4")
    names = [one.name for one in candidates([fmt]) if one.hadamard is not Hadamard.NONE]
    assert "mxfp4_e2m1 floor stochastic 3/4 random Hadamard" in names


def test_names_are_formats_or_aliases_and_each_counts_once() -> None:
    names = [fmt.name for fmt in formats_of(["mxfp8", "hifp8", "mxfp8_e4m3"])]
    assert names == ["mxfp8_e4m3", "hifp8"]


@pytest.mark.parametrize("name", ["mxfp5", "bf16", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--formats must be among bfloat16, .*, nvfp4_ms_eden, got"
    ):
        formats_of(["mxfp8", name])
