"""All of `quantexp verify`: each format's codes and cases, to every kernel on every device, against every oracle.

The gold's answer to a case is worked out once and held against each kernel: values, codes, scales, and what the codes
decode to. What another implementation says of the same case is held against the same replies. The gold itself is held
against rational arithmetic on a part of the cases, and has rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantexp.formats.verify import walsh
from quantexp.formats.verify.asking import Reply, ask, packed, to_numpy, to_torch
from quantexp.formats.verify.codes import decode_every_code, encode_every_code
from quantexp.formats.verify.exact import KINDS, Answer, Case, answer
from quantexp.formats.verify.gold_check import GOLD, check_gold
from quantexp.formats.verify.kernels import KERNELS, Kernel
from quantexp.formats.verify.oracles.oracle import Oracle
from quantexp.formats.verify.questions import SEVERAL_CHUNKS, cases_of
from quantexp.formats.verify.tally import Tally
from quantexp.processes.threads import threads

Array = NDArray[Any]

#: What is verified beside the formats.
TRANSFORM = "hadamard"
SUBJECTS = (*KINDS, TRANSFORM)


@dataclass(frozen=True)
class Placed:
    """A kernel on a device."""

    kernel: Kernel
    device: str

    @property
    def label(self) -> str:
        """As the table names it."""
        return f"{self.kernel.name} ({self.device})"


def devices() -> tuple[str, ...]:
    """The types of device that this machine has."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def place(on: Iterable[str], kernels: Iterable[Kernel] = KERNELS) -> list[Placed]:
    """Every kernel on every one of these devices that it runs on."""
    here = [kernel for kernel in kernels if kernel.is_here()]
    return [Placed(k, device) for k in here for device in on if device in k.devices]


def verify(
    subjects: Iterable[str],
    placed: list[Placed],
    oracles: list[Oracle],
    tell: Callable[[str, Tally], None],
) -> Tally:
    """Compare everything; `tell` hears what is being looked at."""
    tally = Tally()
    for subject in subjects:
        tell(subject, tally)
        if subject == TRANSFORM:
            _check_transform(placed, tally)
            continue
        check_gold(subject, tally)
        with threads(1):
            _check_codes(subject, placed, oracles, tally)
        for case in cases_of(subject):
            large = case.x.size >= 32 * SEVERAL_CHUNKS
            with threads(2 if large else 1):
                check_case(case, placed, oracles, tally)
            tell(subject, tally)
    return tally


def check_case(case: Case, placed: list[Placed], oracles: list[Oracle], tally: Tally) -> None:
    """One case, to all kernels, against the gold and all oracles that know it."""
    gold = answer(case)
    mine = [p for p in placed if case.fmt in p.kernel.formats]
    replies = [(p, ask(p.kernel, p.device, case)) for p in mine]
    for one, reply in replies:
        _against_gold(one, case, gold, reply, tally)
    for oracle in oracles:
        opinion = oracle.opinion(case, gold)
        if opinion is None:
            continue
        theirs = opinion.answer
        for one, reply in replies:
            where, got = (case.fmt, one.label, oracle.name), reply.answer
            tally.add(where, "quantise", theirs.values, got.values, case=case, known=opinion.known)
            if theirs.block_scales is not None and got.block_scales is not None:
                known = opinion.known_blocks
                tally.add(
                    where, "scales", theirs.block_scales, got.block_scales, case=case, known=known
                )


def _against_gold(one: Placed, case: Case, gold: Answer, reply: Reply, tally: Tally) -> None:
    where, got = (case.fmt, one.label, GOLD), reply.answer
    tally.add(where, "quantise", gold.values, got.values, case=case)
    if gold.codes is None or one.kernel.encode is None:
        return
    codes = packed(gold.codes, case.axis) if case.packed else gold.codes
    tally.add(where, "encode", codes, _there(got.codes), case=case)
    tally.add(where, "decode", gold.values, _there(reply.decoded), case=case)
    if gold.block_scales is not None:
        tally.add(where, "scales", gold.block_scales, _there(got.block_scales), case=case)
    if gold.tensor_scale is not None:
        scale = None if got.tensor_scale is None else np.array([got.tensor_scale])
        tally.add(where, "scale", np.array([gold.tensor_scale]), _there(scale), case=case)


def _there(found: Array | None) -> Array:
    """What a kernel gave; nothing has a shape that fits nothing."""
    return np.empty((0, 0), np.float32) if found is None else found


def _check_codes(fmt: str, placed: list[Placed], oracles: list[Oracle], tally: Tally) -> None:
    if fmt == "bf16":
        return
    for one in placed:
        if fmt in one.kernel.formats and one.kernel.encode is not None:
            decode_every_code(fmt, one.kernel, one.device, one.label, oracles, tally)
            encode_every_code(fmt, one.kernel, one.device, (fmt, one.label, GOLD), tally)


def _check_transform(placed: list[Placed], tally: Tally) -> None:
    """Whole numbers against Sylvester's matrix; all others against the stated order of additions, every bit."""
    rng = np.random.default_rng(5)
    transforming = [one for one in placed if one.kernel.hadamard is not None]
    for block in (2, 4, 8, 16, 32, 64, 128):
        whole = rng.integers(-40, 41, (5, 3 * block)).astype(np.float32)
        x = (rng.standard_normal((3, 77, 40)) * np.exp(rng.standard_normal((3, 1, 40)))).astype(
            np.float32
        )
        signs = walsh.signs_of(block, 2**40, block)
        for left in (True, False):
            product = whole.reshape(5, 3, block).astype(np.float64) @ walsh.sylvester(block)
            product = (product * walsh.factor(block, left=left)).reshape(5, -1).astype(np.float32)
            for axis in (0, 1, 2):
                for given in (None, signs):
                    expected = walsh.transformed(x, axis, block, left=left, signs=given)
                    for one in transforming:
                        asked = f"float32 3x77x40 axis={axis} block={block} left={left}"
                        got = _transform(one, x, axis, block, left, given)
                        where = (TRANSFORM, one.label, GOLD)
                        tally.add(where, "hadamard", expected, got, asked=asked)
            for one in transforming:
                got = _transform(one, whole, 1, block, left, None)
                asked = f"whole numbers 5x{3 * block} block={block} left={left}"
                tally.add((TRANSFORM, one.label, GOLD), "hadamard", product, got, asked=asked)


def _transform(
    one: Placed, x: Array, axis: int, block: int, left: bool, signs: Array | None
) -> Array:
    given = None if signs is None else to_torch(signs, "float32", one.device)
    tensor = to_torch(x, "float32", one.device)
    assert one.kernel.hadamard is not None
    with threads(1):
        y = one.kernel.hadamard(tensor, axis=axis, block=block, signs=given, left=left)
    return to_numpy(y)
