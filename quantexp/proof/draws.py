"""What the watcher draws and derives by itself: lines to check, random numbers, signs, scales of earlier iterations.

Nothing here comes from the code that quantises. The random numbers of an operand follow from the run's seed, the
slot's stream, the iteration and the micro-batch (`quantexp.quant.step_state` states the rule). The lines that a check
looks at follow from the same seed by another hash.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypedDict

import torch
from torch import Tensor

from quantexp.formats import Hadamard, QuantSpec, Rounding
from quantexp.proof.image import random_integers
from quantexp.proof.places import Ranks


class Randomness(TypedDict, total=False):
    """The keywords of `image` that depend on the iteration."""

    signs: Tensor | None
    seed: int
    offset: int


@dataclass(frozen=True)
class Moment:
    """When an operand is quantised: what its random numbers depend on."""

    #: The run's.
    seed: int
    iteration: int
    #: Over all processes.
    micro_batch: int = 0
    #: Among those of the rank.
    index: int = 0
    #: Whether a weight has one copy for the whole step, with micro-batch 0's numbers.
    weights_once: bool = False
    #: Which parts of the operands this rank has.
    ranks: Ranks = field(default_factory=Ranks)

    def later(self, num_micro_batches: int) -> Moment:
        """The moment of another micro-batch of the iteration, which has a higher (or lower) number."""
        return replace(self, micro_batch=self.micro_batch + num_micro_batches)

    def randomness(self, spec: QuantSpec, device: torch.device) -> Randomness:
        """Seed, offset and signs of an operand; empty if it needs none."""
        is_once = self.weights_once and spec.once_per_step
        keywords = self.draw(spec, spec.stream, 0 if is_once else self.micro_batch)
        if spec.hadamard is Hadamard.RANDOM:
            keywords["signs"] = self._signs(spec, device)
        return keywords

    def draw(self, spec: QuantSpec, stream: str, micro_batch: int = 0) -> Randomness:
        """Seed and offset of a stream; empty unless values depend on random numbers."""
        if not spec.draws:
            return {}
        seed = _hashed(f"{self.seed} {stream}")
        return {"seed": seed, "offset": self._offset(micro_batch)}

    def _signs(self, spec: QuantSpec, device: torch.device) -> Tensor:
        product = spec.stream.rpartition(".")[0]
        places = torch.arange(spec.hadamard_block, device=device)
        numbers = random_integers(
            places, _hashed(f"{self.seed} {product}"), self._offset(self.micro_batch)
        )
        return torch.where(numbers < 1 << 23, 1.0, -1.0)

    def _offset(self, micro_batch: int) -> int:
        return (self.iteration << 32) + micro_batch

    def choice(self, *names: object) -> random.Random:
        """A generator for what a check looks at."""
        words = f"{self.seed} proof {self.iteration} {self.micro_batch} {_joined(*names)}"
        return random.Random(_hashed(words))


@lru_cache(maxsize=1 << 14)
def _joined(*names: object) -> str:
    return " ".join(map(str, names))


def _hashed(words: str) -> int:
    """The first 8 bytes, big-endian, of sha256."""
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big")


def lines(chosen: random.Random, extent: int, run: int, number: int) -> Tensor:
    """Indices below `extent`, ascending: at least `number` of them (or all), in aligned runs of `run`.

    One run is drawn from each of as many equal parts of the extent.
    """
    run = min(run, extent)
    parts = _parts(-(-extent // run), -(-number // run))
    picked = [low + int(chosen.random() * length) for low, length in parts]
    if run > 1:
        picked = [line for n in picked for line in range(n * run, min(extent, (n + 1) * run))]
    return torch.frombuffer(array("q", picked), dtype=torch.int64)  # faster than torch.tensor


@lru_cache(maxsize=256)
def _parts(extent: int, number: int) -> list[tuple[int, int]]:
    """Starts and lengths of so many equal parts, or of single elements."""
    number = min(number, extent)
    starts = [n * extent // number for n in range(number + 1)]
    return [(low, high - low) for low, high in pairwise(starts)]


def run_of(specs: Sequence[QuantSpec], is_along: Sequence[bool]) -> int:
    """How many neighbouring lines a check must take together, so that it sees whole blocks.

    Args:
        specs: of the operands whose lines are taken.
        is_along: for each, whether its blocks run across the lines, as those of a reused forward copy.
    """
    longest = 1
    for spec, along in zip(specs, is_along, strict=True):
        own = spec.fmt.across
        if along:
            own = max(spec.block, spec.hadamard_block if spec.is_transformed else 1)
        longest = max(longest, own)
    return longest


def is_stochastic(spec: QuantSpec) -> bool:
    """Whether the places of an operand's elements in the whole tensor matter."""
    return spec.rounding is Rounding.STOCHASTIC
