"""Decides which iterations are captured.

The schedule is the union of three keys:

    capture.iterations       a list of iterations and ranges: [1, 100, 200-210]
    capture.every            every N-th: N, 2N, 3N, ...
    capture.powers_of_two    1, 2, 4, 8, ...

Without any of them every iteration is in the schedule. `capture.first_iteration` drops earlier iterations, and
`capture.control_iter` limits the number of remaining ones: 0 means all, and null means one iteration without a schedule
and all iterations of a schedule. `capture.at_end` adds the last iteration of the run to whatever these keys select. A
captured iteration includes its forward and backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from quantexp.errors import ConfigError
from quantexp.schema import CaptureConfig, CaptureLevel

#: Iterations that are enumerated one by one.
_MOST_NAMED = 1_000_000
_ITEM = re.compile(r"(\d+)(?:-(\d+))?")


def check_schedule(capture: CaptureConfig, iterations: int) -> None:
    """Refuse a schedule that cannot be parsed, or that contains no iteration of the run.

    Raises:
        ConfigError: names the key.
    """
    _count(capture, iterations)
    taken = _selected(capture, iterations)
    if capture.level is not CaptureLevel.off and has_schedule(capture) and not taken:
        raise ConfigError(
            f"capture.{_keys(capture)} must name an iteration from capture.first_iteration={capture.first_iteration} "
            f"to training.iterations={iterations}, and names none; change it, or capture=off"
        )


def _count(capture: CaptureConfig, iterations: int) -> None:
    """Refuse a list whose iterations are too many to enumerate."""
    items = map(_item, capture.iterations)
    named = sum(max(0, min(last, iterations) + 1 - first) for first, last in items)
    if capture.every is not None and (
        capture.iterations or capture.powers_of_two or capture.at_end
    ):
        named += iterations // capture.every
    if named > _MOST_NAMED:
        raise ConfigError(
            f"capture.{_keys(capture)} must name at most {_MOST_NAMED:,} iterations, got {named:,}; for more, use "
            "capture.every alone"
        )


def has_schedule(capture: CaptureConfig) -> bool:
    """Whether any of the three keys is set."""
    return bool(capture.iterations) or capture.every is not None or capture.powers_of_two


def ends_by_itself(capture: CaptureConfig) -> bool:
    """Whether the capture ends at an iteration that does not depend on the length of the run."""
    if capture.level is CaptureLevel.off or capture.control_iter == 0:
        return False
    endless = capture.every is not None or capture.powers_of_two
    return capture.control_iter is not None or not endless


def captured_iterations(capture: CaptureConfig, iterations: int) -> Sequence[int]:
    """The captured iterations of a run of this many iterations, ascending; membership tests are cheap."""
    if capture.level is CaptureLevel.off:
        return range(0)
    selected = _selected(capture, iterations)
    adds_last = capture.at_end and not capture.stop_after_capture
    if adds_last and capture.first_iteration <= iterations and iterations not in selected:
        return (*selected, iterations)
    return selected


def _selected(capture: CaptureConfig, iterations: int) -> Sequence[int]:
    limit = capture.control_iter
    if not has_schedule(capture):
        first, count = capture.first_iteration, 1 if limit is None else limit
        return range(first, min(iterations, first + count - 1 if count else iterations) + 1)
    first = capture.first_iteration
    if capture.every is not None and not (capture.iterations or capture.powers_of_two):
        start = -(-first // capture.every) * capture.every
        return range(start, iterations + 1, capture.every)[: limit or None]
    named = {i for i in _named(capture, iterations) if first <= i <= iterations}
    return tuple(islice(sorted(named), limit or None))


def _named(capture: CaptureConfig, iterations: int) -> Iterator[int]:
    for item in capture.iterations:
        first, last = _item(item)
        yield from range(first, min(last, iterations) + 1)
    if capture.every is not None:
        yield from range(capture.every, iterations + 1, capture.every)
    if capture.powers_of_two:
        yield from (1 << k for k in range(iterations.bit_length()))


def _item(item: str) -> tuple[int, int]:
    """First and last iteration of one item of the list."""
    match = _ITEM.fullmatch(item)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            "capture.iterations must list iterations from 1 and ranges such as 10-20, first and last included, "
            f"got {item!r}"
        )
    return first, last


def _keys(capture: CaptureConfig) -> str:
    uses = {
        "iterations": bool(capture.iterations),
        "every": capture.every is not None,
        "powers_of_two": capture.powers_of_two,
    }
    return ", capture.".join(name for name, is_used in uses.items() if is_used)
