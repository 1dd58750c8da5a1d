"""Two codes per byte: as torchao packs them, along any axis, and back."""

from __future__ import annotations

import pytest
import torch

from quantexp.extras.verify.oracles import torchao_oracle
from quantexp.formats import FORMATS, decode, encode, quantise

from .tensors import assert_same

PACKED = [name for name, fmt in FORMATS.items() if fmt.element.bits == 4]
all_packed = pytest.mark.parametrize("name", PACKED)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@all_packed
def test_bytes_are_those_of_torchao(name: str) -> None:
    x = normal(8, 64)
    codes, scales = encode(x, name)
    packed, same_scales = encode(x, name, packed=True)
    assert packed.dtype == torch.uint8
    assert packed.numpy().tolist() == torchao_oracle.packed(codes.numpy()).tolist()
    assert_same(decode(packed, same_scales, name, packed=True), decode(codes, scales, name))


@all_packed
@pytest.mark.parametrize("shape", [(5, 12, 9), (70, 45), (1, 3), (33,), (2, 0, 5), (0,), ()])
def test_any_axis_and_an_odd_extent_come_back(name: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    for axis in range(-max(1, len(shape)), max(1, len(shape))):
        extent = shape[axis] if shape else 1
        packed, scales = encode(x, name, axis=axis, packed=True)
        if shape:
            assert packed.shape[axis] == -(-extent // 2)
        y = decode(packed, scales, name, axis=axis, packed=True, extent=extent if shape else None)
        assert_same(y, quantise(x, name, axis=axis))


def test_the_first_of_two_lies_in_the_lower_half_and_an_odd_last_alone() -> None:
    x = torch.tensor([1.0, -0.5, 6.0])
    packed, _ = encode(x, "mxfp4", packed=True)
    assert packed.tolist() == [0x92, 0x07]


def test_every_byte_is_two_codes() -> None:
    packed = torch.arange(256).to(torch.uint8).view(16, 16)
    scales = torch.full((16, 1), 127, dtype=torch.uint8)
    y = decode(packed, scales, "mxfp4", packed=True)
    codes = torch.stack([packed & 15, packed >> 4], dim=2).view(16, 32)
    assert_same(y, decode(codes, scales, "mxfp4"))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp6_e2m3", "fp8_e5m2", "hifp8"])
def test_codes_of_other_widths_cannot_be_packed(name: str) -> None:
    bits = FORMATS[name].element.bits
    words = f"{name} has codes of {bits} bits, packed takes 4: .* one of mxfp4_e2m1, nvfp4_e2m1"
    with pytest.raises(ValueError, match=words):
        encode(normal(4), name, packed=True)
    codes, scales = encode(normal(4), name)
    with pytest.raises(ValueError, match=words):
        decode(codes, scales, name, packed=True)


@pytest.mark.parametrize("extent", [4, 7, 9, -1])
def test_an_extent_that_does_not_fit_the_bytes_is_refused(extent: int) -> None:
    packed, scales = encode(normal(6), "mxfp4", packed=True)
    with pytest.raises(
        ValueError, match=f"extent must be 6 or one less for 3 bytes of two codes, got {extent}"
    ):
        decode(packed, scales, "mxfp4", packed=True, extent=extent)


def test_an_extent_is_for_packed_codes() -> None:
    codes, scales = encode(normal(6), "mxfp4")
    with pytest.raises(ValueError, match="extent is for packed codes alone, got 6: leave it out"):
        decode(codes, scales, "mxfp4", extent=6)


def test_packed_codes_are_bytes() -> None:
    with pytest.raises(TypeError, match=r"codes must be uint8, got torch\.int64"):
        decode(torch.zeros(3, dtype=torch.long), torch.zeros(1), "mxfp4", packed=True)
