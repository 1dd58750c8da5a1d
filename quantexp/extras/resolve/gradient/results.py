"""results.jsonl of `quantexp gradient`: a line for each arm of a checkpoint, proved or with the reason why not.

branch       the name that follows from all that decides its numbers; the folder below `gradients/`
run, seed, checkpoint, scheme
batches, draws, by      how many batches, how many draws of each, and what is quantised alone besides the whole
parts        by name (`""` is the whole scheme) and scaling the estimates of all parameters, then of each group
groups, signal          the groups; of the gradient in fp32, |its mean|^2 in parts of its mean square, likewise
code, cpu_s, failure, time      as in a design of branches
"""

from __future__ import annotations

from typing import TypedDict

from quantexp.extras.resolve.gradient.estimates import Estimates

#: The name of the whole scheme among its parts.
WHOLE = ""
#: The scalings: of elements as they are, and divided by Adam's root v.
RAW, ADAM = "raw", "adam"


class Line(TypedDict):
    """A line of results.jsonl."""

    branch: str
    run: str
    seed: int
    checkpoint: int
    scheme: str
    batches: int
    draws: int
    by: list[str]
    parts: dict[str, dict[str, list[Estimates]]]
    groups: list[str]
    signal: dict[str, list[float | None]]
    code: str
    cpu_s: float
    failure: str | None
    time: str
