"""Two processes that share each sequence attend as one process does.

In float32, of T = 128 tokens in chunks of 32, one block each. Every operand has the blocks and scales of one process.
Sums differ in their order: a product of other extents may be summed otherwise, and dk and dv are sums of two parts.
A sum of 128 terms errs by about sqrt(128) 2^-24 = 7e-7 of its terms' norm, and four products follow each other: 2e-6.
If one of them moved an element of a 4-bit operand to the other side of a tie, the result would differ by 1e-4; an
element lies that close to a tie with a probability of 1e-7, so of 10^5 elements one does in a hundred seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gloo import in_processes
from tests.quant.attention.kernels.tiled_cases import declared
from tests.training.megatron.context_ranks import Distances, Report, attend

pytestmark = pytest.mark.slow

FULL = {
    "mxfp8": ("quant=more/FA_full_mxfp8", "quant/pv=mxfp8"),
    "mxfp4": ("quant=more/FA_full_mxfp4", "quant/pv=mxfp4"),
    "hifp8": ("quant=more/FA_full_hifp8", "quant/pv=hifp8"),
    "fp8": ("quant=more/FA_full_fp8", "quant/pv=fp8"),
    "nvfp4": ("quant=more/FA_full_nvfp4", "quant/pv=nvfp4"),
}
BACKWARD = tuple(
    f"quant.pv.{slot}.format" for slot in ("dgrad_p.dO", "dgrad_p.v", "dgrad_v.P", "dgrad_v.dO")
)
FORMATS = {
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "hifp8": "hifp8",
    "fp8": "fp8_e4m3",
    "nvfp4": "nvfp4",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    schemes = {"bf16": declared("quant=bf16")}
    for name, words in FULL.items():
        backward = [f"{key}={FORMATS[name]}" for key in BACKWARD]
        schemes[name] = declared(*words, *backward)
    folder: Path = tmp_path_factory.mktemp("context")
    return in_processes(attend, 2, folder, schemes)


def distances(reports: list[Report], *key: str) -> list[Distances]:
    scheme, path, case = key
    return [report[scheme, path, case][0] for report in reports]


@pytest.mark.parametrize("scheme", ["bf16", *FULL])
@pytest.mark.parametrize("case", [("plain", "causal"), ("tiled", "causal"), ("tiled", "documents")])
def test_two_ranks_attend_as_one_process(
    reports: list[Report], scheme: str, case: tuple[str, str]
) -> None:
    for of_rank in distances(reports, scheme, *case):
        assert len(of_rank) == 4
        assert max(of_rank) < 2e-6, of_rank


def test_plain_path_takes_the_rows_of_a_mask(reports: list[Report]) -> None:
    for of_rank in distances(reports, "mxfp8", "plain", "documents"):
        assert max(of_rank) < 2e-6, of_rank


@pytest.mark.parametrize("path", ["plain", "tiled"])
def test_bf16_differs_by_roundings(reports: list[Report], path: str) -> None:
    """One rounding is 2^-9 at most; dk and dv of one process have up to three, of two ranks one."""
    for of_rank in distances(reports, "mxfp8", path, "bf16"):
        assert max(of_rank) < 2**-8, of_rank


def test_every_slot_engages_on_both_ranks(reports: list[Report]) -> None:
    for report in reports:
        for (scheme, path, case), (_, statuses) in report.items():
            if scheme in FULL and case != "documents":
                assert set(statuses) == {"engaged"}, (scheme, path, case)
                assert len(statuses) == 12


def test_tokens_in_the_order_of_ranks_are_wrong(reports: list[Report]) -> None:
    for of_rank in distances(reports, "wrong order", "plain", "causal"):
        assert min(of_rank) > 0.1, of_rank


def test_fused_path_is_refused_with_its_reason(reports: list[Report]) -> None:
    message = (
        "training.attention=fused cannot share a sequence between ranks, got parallel.context=2: its kernel's causal "
        "mask takes query i for token i; use training.attention=tiled or plain"
    )
    assert all(("fused", "", message) in report for report in reports)
