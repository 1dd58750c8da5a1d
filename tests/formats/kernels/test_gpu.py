"""What the GPU kernels claim, and the reasons if there are none."""

from __future__ import annotations

import sys

import pytest
import torch

from quantexp.formats import FORMATS
from quantexp.formats.kernels import gpu
from quantexp.formats.kernels.gpu_panels import CANDIDATES, LAUNCHES
from quantexp.formats.spec import QuantSpec, resolve
from quantexp.formats.types import Family

from .gpu_cases import needs_triton

MX = [fmt.name for fmt in FORMATS.values() if fmt.family is Family.MX]
DEVICE = torch.device("cuda", 0)


class Marked(torch.Tensor):
    """A subclass, which may contain anything."""


@pytest.mark.parametrize("rounding", ["even", "away"])
@pytest.mark.parametrize("fmt", [*MX, "hifp8"])
def test_mx_and_hifloat8_rounded_to_nearest_have_kernels_of_their_own(
    fmt: str, rounding: str
) -> None:
    assert gpu.claims_spec(resolve(fmt, rounding=rounding))
    assert gpu.has_own_kernel(resolve(fmt, rounding=rounding))


@pytest.mark.parametrize(
    "options",
    [
        resolve("mxfp8", rounding="stochastic"),
        resolve("hifp8", rounding="stochastic"),
        resolve("mxfp4", pre_scale=True),
        resolve("mxfp8", block=16),
        resolve("nvfp4"),
        resolve("fp8_e4m3"),
    ],
    ids=lambda options: f"{options.fmt.name}-{options.rounding}-{options.block}",
)
def test_all_else_has_that_of_panels(options: QuantSpec) -> None:
    assert gpu.claims_spec(options)
    assert not gpu.has_own_kernel(options)


def test_plain_tensors_of_the_three_dtypes_on_a_gpu_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not gpu.reads(torch.zeros(32)), "it is not on a GPU"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(gpu, "obstacle", lambda device: None)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert gpu.reads(torch.zeros(32, dtype=dtype))
    assert gpu.reads(torch.nn.Parameter(torch.zeros(32)))
    assert not gpu.reads(torch.zeros(32, dtype=torch.float64))
    assert not gpu.reads(torch.zeros(32).as_subclass(Marked))
    monkeypatch.setattr(gpu, "obstacle", lambda device: "for a reason")
    assert not gpu.reads(torch.zeros(32))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with an H100 and a working Triton."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "_refusal", lambda device: None)
    return monkeypatch


def obstacle() -> str | None:
    return gpu.obstacle.__wrapped__(DEVICE)


@needs_triton
def test_a_hopper_has_no_obstacle(hopper: pytest.MonkeyPatch) -> None:
    assert obstacle() is None


def test_an_amd_gpu_has_no_kernel(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.version, "hip", "7.0")
    assert obstacle() == "the kernels are not checked on AMD GPUs"


def test_an_old_gpu_has_no_kernel(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert obstacle() == "compute capability 7.5 is below 8.0"


def test_without_triton_there_is_no_kernel(hopper: pytest.MonkeyPatch) -> None:
    hopper.setitem(sys.modules, "triton", None)
    assert obstacle().startswith("Triton cannot be imported: ")


@needs_triton
def test_a_triton_that_flushes_subnormals_is_not_used(hopper: pytest.MonkeyPatch) -> None:
    import triton

    hopper.setattr(triton, "__version__", "3.5.1")
    assert obstacle() == "Triton 3.5.1 is older than 3.6: its divisions flush subnormals"
    hopper.setattr(triton, "__version__", "3.10.0+git1")
    assert obstacle() is None


@needs_triton
def test_tritons_own_message_is_the_reason_if_it_cannot_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC.")

    monkeypatch.setattr(gpu, "quantise", fails)
    assert (
        gpu._refusal(torch.device("cpu")) == "Triton does not compile: Failed to find C compiler."
    )


def test_every_kernel_has_a_launch_among_those_worth_trying() -> None:
    assert {name for name, _ in LAUNCHES} == set(CANDIDATES)
    for (name, _), launch in LAUNCHES.items():
        assert launch in CANDIDATES[name]
