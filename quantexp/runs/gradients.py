"""The results of `quantexp bisect --gradient` in a run folder: gradients.json.

Every gradient is that of the same iteration, of the same weights and tokens. A group is one layer of the decoder, or
what lies beside them: embedding, final norm, output layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from quantexp.reading.json_files import require_json
from quantexp.reading.typed import Count
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import does_only
from quantexp.runs.status import write_json

#: In the folder's name, after the scheme.
SUFFIX = "_gradient"
#: What a pass quantises: the scheme, one unit alone, or all but one unit.
SCHEME, ALONE, WITHOUT = "scheme", "alone", "without"


class Distance(TypedDict):
    """A gradient against that in bf16; null where it is not finite, or where the bf16 gradient is zero."""

    #: Of the angle between them, -1 to 1.
    cosine: float | None
    #: The 2-norm of their difference over that of the bf16 gradient.
    distance: float | None


class Pass(TypedDict):
    """The gradient under one map."""

    #: `scheme`, `alone` or `without`.
    kind: str
    #: The unit in words; None for the scheme.
    unit: str | None
    loss: float | None
    #: Of all parameters.
    whole: Distance
    #: In the order of `Gradients.groups`.
    groups: list[Distance]


class Gradients(TypedDict):
    """The content of gradients.json."""

    #: Whose tokens these are; the weights are those before it.
    iteration: Count
    by: list[str]
    bf16_loss: float | None
    #: The 2-norm of the bf16 gradient of all parameters, and of each group.
    bf16_norm: float | None
    groups: list[str]
    bf16_norms: list[float | None]
    passes: list[Pass]


def is_gradient(run: RunDir) -> bool:
    """Whether a run computes gradients instead of training; a run whose config.yaml cannot be read trains."""
    is_named = f"{SUFFIX}-" in run.root.name
    return (is_named or run.gradients.exists()) and does_only(run, "gradient")


def write_gradients(run: RunDir, content: Mapping[str, Any]) -> None:
    """Write gradients.json; it stands for complete results."""
    write_json(run.gradients, content)


def read_gradients(run: RunDir) -> Gradients | None:
    """The results; None if there are none.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(run.gradients, Gradients) if run.gradients.exists() else None
