"""Which fault is planted in which setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .faults import Fault, Group
from .settings import LAYOUTS, SETTINGS, Kind

#: The faults of one slot: where every slot is quantised, where few are, and where none is.
_SLOT_SETTINGS = (
    *("mxfp4", "fp8", "bf16", "all slots mxfp4", "all slots fp8", "sr rht", "delayed"),
    *("all slots mxfp4 tiled", "all slots fp8 tiled", "mxfp4 fp16", "mxfp4 fp32", "bf16 fp32"),
    *("experts mxfp4", "latent mxfp8", "tp2 sp mxfp4", "cp2 all slots fp8"),
)
#: Groups that evaluations see, where no gradient exists.
_FORWARD = (Group.IMAGE, Group.HIDDEN, Group.PASS)
#: Groups that are planted on several ranks alike: some faults of each.
_ON_RANKS = (Group.IMAGE, Group.HIDDEN, Group.MOMENT, Group.RESULT, Group.STATE)
_SAMPLE = (
    *("noise", "negated", "one scale", "half amax", "other scale rule", "stochastic", "twice"),
    *("other axis", "numpy", "thread", "output replaced", "numpy in linear.wgrad"),
    *("numpy in qk.dgrad_k", "stale weights", "from iteration 3", "micro-batch 1 zero"),
    *("iteration 1 only", "x of another micro-batch", "dw twice", "rows of dx", "seed 0"),
    *("one seed for all layers", "signs of one operand", "dk of one head", "output scaled"),
)


def pairs(faults: Iterable[Fault], settings: Iterable[str]) -> Iterator[tuple[str, Fault]]:
    """Setting by setting, every fault that may have a place there."""
    faults = list(faults)
    for name in settings:
        for fault in faults:
            if is_pair(fault, name):
                yield name, fault


def is_pair(fault: Fault, name: str) -> bool:
    """Whether a fault is planted in a setting."""
    setting = SETTINGS[name]
    if fault.tags and not fault.tags & setting.tags:
        return False
    if fault.tags:
        return True
    if fault.group is Group.SLOT:
        return name in _SLOT_SETTINGS
    if name in LAYOUTS and fault.group in _ON_RANKS:
        return fault.name in _SAMPLE
    return setting.kind is not Kind.EVALUATE or fault.group in _FORWARD
