"""One run that is watched: its metrics, and what its other files say, read again only if one of them has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from quantexp.analysis.compare.baseline import baseline_of
from quantexp.analysis.compare.matched import LENGTH, in_words
from quantexp.analysis.compare.side import Side, read_side
from quantexp.extras.forensics.watch.metrics import FollowedMetrics
from quantexp.extras.forensics.watch.tail import Signature, signature
from quantexp.runs.paths import RunDir
from quantexp.runs.precision import proof_word

#: A curve is drawn anew when it has grown by this share, which is less than a point of the screen.
_SHARE = 1 / 400


class FollowedRun:
    """A run, and what has been read of it."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        #: Names the run in addresses; says nothing about its place.
        self.key = hashlib.sha256(str(run.root).encode(errors="surrogateescape")).hexdigest()[:12]
        self.metrics = FollowedMetrics(run)
        #: The run as a comparison sees it, with the losses of a few lines; read by `refresh_side`.
        self.side: Side
        self._signatures: tuple[Signature | bool, ...] | None = None
        self._drawn: tuple[int, bool, bool] | None = None

    def refresh_side(self) -> bool:
        """Read the other files again if one of them, or whether there are losses, has changed; returns whether."""
        files = (self.run.config, self.run.provenance, self.run.precision)
        now = (
            *map(signature, files),
            any(line.get("loss") is not None for line in self.metrics.lines),
        )
        if now == self._signatures:
            return False
        self._signatures = now
        self.side = read_side(self.run, lines=self.metrics.lines)
        return True

    @property
    def proof(self) -> str | None:
        """`proved`, `declared`, `failed`, or None."""
        return proof_word(self.side.precision)

    def is_to_draw(self) -> bool:
        """Whether the curve looks other than when this last returned true."""
        count, is_sketch = len(self.metrics.line[0]), self.metrics.sketch is not None
        before = self._drawn
        grown = before is None or count < before[0] or count - before[0] > before[0] * _SHARE
        ended = before is not None and self.is_ended and (count, True) != (before[0], before[2])
        if not (grown or ended or (before and is_sketch != before[1])):
            return False
        self._drawn = count, is_sketch, self.is_ended
        return True

    #: Whether the ledger says that the run has ended.
    is_ended = False


class Pairs:
    """The baseline of each run, as a comparison finds it."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._pairs = [None if s.is_baseline else baseline_of(s, sides) for s in sides]

    def baseline(self, i: int) -> int | None:
        """The place of a run's baseline; None for a baseline, and for a run that has none."""
        pair = self._pairs[i]
        return pair[0] if isinstance(pair, tuple) else None

    def note(self, i: int) -> str:
        """Why a run has no baseline, or is no matched pair with it; runs that go on may differ in their length."""
        pair = self._pairs[i]
        if isinstance(pair, str):
            return f"no gap: {pair}"
        others = [] if pair is None else [one for one in pair[1] if one.aspect != LENGTH]
        return f"not a matched pair: {in_words(others)}" if others else ""
