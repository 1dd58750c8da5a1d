"""The suite of `quantexp verify`: each format's codes and cases, on every kernel and device, against every oracle.

The gold's result for a case is computed once and compared with each kernel's: values, codes, scales, and decoded
codes. Each oracle's result for the case is compared with the same replies. The gold itself is compared with rational
arithmetic on a part of the cases, and has its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantexp.extras.verify import draws
from quantexp.extras.verify.codes import decode_every_code, encode_every_code
from quantexp.extras.verify.declared import verify_declared
from quantexp.extras.verify.exact import KINDS, Answer, Case, answer
from quantexp.extras.verify.gold_check import GOLD, check_gold
from quantexp.extras.verify.kernels import (
    KERNELS,
    Kernel,
    Placed,
    Reply,
    ask,
    packed,
    to_numpy,
    to_torch,
)
from quantexp.extras.verify.oracles.oracle import Oracle
from quantexp.extras.verify.questions import SEVERAL_CHUNKS, cases_of
from quantexp.extras.verify.tally import Tally
from quantexp.formats import Format
from quantexp.processes.threads import threads

Array = NDArray[Any]

#: Verified in addition to the formats.
TRANSFORM = "hadamard"
SUBJECTS = (*KINDS, TRANSFORM)


def devices() -> tuple[str, ...]:
    """The device types of this machine."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def place(on: Iterable[str], kernels: Iterable[Kernel] = KERNELS) -> list[Placed]:
    """Every available kernel on every one of these devices that it supports."""
    available = [kernel for kernel in kernels if kernel.is_available()]
    return [Placed(k, device) for k in available for device in on if device in k.devices]


def verify(
    subjects: Iterable[str],
    placed: list[Placed],
    oracles: list[Oracle],
    tell: Callable[[str, Tally], None],
    declared: Mapping[str, Format] | None = None,
) -> Tally:
    """Compare everything; `tell` receives the current subject and the tally.

    `declared` are the declared formats among the subjects, by name.
    """
    tally = Tally()
    for subject in subjects:
        tell(subject, tally)
        if declared and subject in declared:
            verify_declared(declared[subject], placed, tally, tell)
            continue
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
    """Run one case on all kernels and compare with the gold and all oracles that support it."""
    gold = answer(case)
    targets = [p for p in placed if case.fmt in p.kernel.formats and p.rounds(case.rounding)]
    replies = [(target, ask(target.kernel, target.device, case)) for target in targets]
    for target, reply in replies:
        _against_gold(target, case, gold, reply, tally)
    for oracle in oracles:
        opinion = oracle.opinion(case, gold)
        if opinion is None:
            continue
        theirs = opinion.answer
        for target, reply in replies:
            where, got = (case.fmt, target.label, oracle.name), reply.answer
            tally.add(where, "quantise", theirs.values, got.values, case=case, known=opinion.known)
            if theirs.block_scales is not None and got.block_scales is not None:
                known = opinion.known_blocks
                tally.add(
                    where, "scales", theirs.block_scales, got.block_scales, case=case, known=known
                )


def _against_gold(target: Placed, case: Case, gold: Answer, reply: Reply, tally: Tally) -> None:
    where, got = (case.fmt, target.label, GOLD), reply.answer
    tally.add(where, "quantise", gold.values, got.values, case=case)
    if gold.codes is None or target.kernel.encode is None:
        return
    codes = packed(gold.codes, case.axis) if case.packed else gold.codes
    tally.add(where, "encode", codes, _or_empty(got.codes), case=case)
    tally.add(where, "decode", gold.values, _or_empty(reply.decoded), case=case)
    if gold.block_scales is not None:
        tally.add(where, "scales", gold.block_scales, _or_empty(got.block_scales), case=case)
    if gold.tensor_scale is not None:
        scale = None if got.tensor_scale is None else np.array([got.tensor_scale])
        tally.add(where, "scale", np.array([gold.tensor_scale]), _or_empty(scale), case=case)


def _or_empty(result: Array | None) -> Array:
    """A kernel's result; for None an array whose shape matches nothing."""
    return np.empty((0, 0), np.float32) if result is None else result


def _check_codes(fmt: str, placed: list[Placed], oracles: list[Oracle], tally: Tally) -> None:
    if fmt == "bf16":
        return
    for target in placed:
        kernel, device, label = target.kernel, target.device, target.label
        if fmt in kernel.formats and kernel.encode is not None:
            decode_every_code(fmt, kernel, device, label, oracles, tally)
            encode_every_code(fmt, kernel, device, (fmt, label, GOLD), tally)


def _check_transform(placed: list[Placed], tally: Tally) -> None:
    """Integers against Sylvester's matrix; all other values against the stated order of additions, bit for bit."""
    rng = np.random.default_rng(5)
    transforming = [target for target in placed if target.kernel.hadamard is not None]
    for block in (2, 4, 8, 16, 32, 64, 128):
        whole = rng.integers(-40, 41, (5, 3 * block)).astype(np.float32)
        x = (rng.standard_normal((3, 77, 40)) * np.exp(rng.standard_normal((3, 1, 40)))).astype(
            np.float32
        )
        signs = draws.signs_of(block, 2**40, block)
        for left in (True, False):
            product = whole.reshape(5, 3, block).astype(np.float64) @ draws.sylvester(block)
            product = (product * draws.factor(block, left=left)).reshape(5, -1).astype(np.float32)
            for axis in (0, 1, 2):
                for chosen in (None, signs):
                    expected = draws.transformed(x, axis, block, left=left, signs=chosen)
                    for target in transforming:
                        description = f"float32 3x77x40 axis={axis} block={block} left={left}"
                        got = _transform(target, x, axis, block, left, chosen)
                        where = (TRANSFORM, target.label, GOLD)
                        tally.add(where, "hadamard", expected, got, description=description)
            for target in transforming:
                got = _transform(target, whole, 1, block, left, None)
                description = f"whole numbers 5x{3 * block} block={block} left={left}"
                where = (TRANSFORM, target.label, GOLD)
                tally.add(where, "hadamard", product, got, description=description)


def _transform(
    target: Placed, x: Array, axis: int, block: int, left: bool, signs: Array | None
) -> Array:
    s = None if signs is None else to_torch(signs, "float32", target.device)
    tensor = to_torch(x, "float32", target.device)
    assert target.kernel.hadamard is not None
    with threads(1):
        y = target.kernel.hadamard(tensor, axis=axis, block=block, signs=s, left=left)
    return to_numpy(y)
