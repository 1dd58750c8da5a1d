"""The ten schemes as the design declares them, slot by slot, written down a second time.

linear quantises all six linear slots; FA quantises q and k forward, the backward takes the forward's copies (`reuse`),
dS stays in the working precision; no scheme touches pv. mxfp8 is E4M3 with rceil, mxfp4 floor, both in blocks of 32 to
nearest even; hifp8 has one power of two a tensor that brings amax to 15, or 224 for a gradient, and rounds ties away.
"""

from __future__ import annotations

from .captured import Slot

#: The choices of each scheme for (linear, qk).
SCHEMES = {
    "bf16": ("bf16", "bf16"),
    "FA_mxfp8": ("bf16", "mxfp8"),
    "FA_mxfp4": ("bf16", "mxfp4"),
    "FA_hifp8": ("bf16", "hifp8"),
    "linear_mxfp8": ("mxfp8", "bf16"),
    "linear_mxfp4": ("mxfp4", "bf16"),
    "linear_hifp8": ("hifp8", "bf16"),
    "FA_linear_mxfp8": ("mxfp8", "mxfp8"),
    "FA_linear_mxfp4": ("mxfp4", "mxfp4"),
    "FA_linear_hifp8": ("hifp8", "hifp8"),
}
FORMATS = ("bf16", "mxfp8", "mxfp4", "hifp8")

_OPTIONS: dict[str, Slot] = {
    "bf16": {"format": "bf16"},
    "mxfp8": {"format": "mxfp8_e4m3", "block": 32, "scale_rule": "rceil", "rounding": "even"},
    "mxfp4": {"format": "mxfp4_e2m1", "block": 32, "scale_rule": "floor", "rounding": "even"},
    "hifp8": {"format": "hifp8", "rounding": "away", "scaling": "current", "saturate": True},
}
_UNSET: Slot = dict.fromkeys(
    ("block", "scale_rule", "rounding", "scaling", "saturate", "amax_target")
)


def linear_slots(choice: str) -> dict[str, Slot]:
    """The formats of a linear module."""
    return {
        "fprop.x": _slot(choice, "input_width"),
        "fprop.w": _slot(choice, "input_width"),
        "dgrad.g": _slot(choice, "output_width", amax_target=224.0),
        "dgrad.w": _slot(choice, "output_width"),
        "wgrad.g": _slot(choice, "tokens", amax_target=224.0),
        "wgrad.x": _slot(choice, "tokens"),
    }


def attention_slots(qk: str, pv: str = "bf16") -> dict[str, Slot]:
    """The formats of an attention module."""
    return {
        "qk.fprop.q": _slot(qk, "head_dim"),
        "qk.fprop.k": _slot(qk, "head_dim"),
        "qk.dgrad_q.dS": _slot("bf16", "keys"),
        "qk.dgrad_q.k": _copy(qk, "head_dim", "keys"),
        "qk.dgrad_k.dS": _slot("bf16", "queries"),
        "qk.dgrad_k.q": _copy(qk, "head_dim", "queries"),
        "pv.fprop.P": _slot(pv, "keys"),
        "pv.fprop.v": _slot(pv, "keys"),
        "pv.dgrad_p.dO": _slot("bf16", "head_dim"),
        "pv.dgrad_p.v": _copy(pv, "keys", "head_dim"),
        "pv.dgrad_v.P": _copy(pv, "keys", "queries"),
        "pv.dgrad_v.dO": _slot("bf16", "queries"),
    }


def _slot(choice: str, axis: str, amax_target: float = 15.0) -> dict[str, object]:
    target = {"amax_target": amax_target} if choice == "hifp8" else {}
    return {**_UNSET, **_OPTIONS[choice], **target, "axis": axis, "reuse": False}


def _copy(choice: str, forward_axis: str, own_axis: str) -> dict[str, object]:
    """The forward's copy, along the forward's axis; in the working precision there is nothing to copy."""
    if choice == "bf16":
        return _slot(choice, own_axis)
    return {**_slot(choice, forward_axis), "reuse": True}
