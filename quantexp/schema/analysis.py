"""Configuration of the analysis after a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quantexp.schema.limits import Limit, limited


class AutoDraw(Enum):
    """The figures drawn after a run."""

    everything = "true"
    quick = "quick"
    nothing = "false"


_AUTO = Limit(
    lambda text: text.lower() in {auto.value for auto in AutoDraw},
    "must be quick (one picture), true (all figures) or false (none)",
)


@dataclass
class AnalysisConfig:
    """The analysis after a run."""

    #: quick: figures/quick_analysis.png and report.html; true: also the whole tree of `quantexp draw`, as PNG;
    #: false: nothing.
    auto: str = limited("quick", _AUTO)

    @property
    def drawing(self) -> AutoDraw:
        """`auto` as an Enum; the field is a string because OmegaConf accepts no Enum member `true`.

        Raises:
            ValueError: any other value.
        """
        return AutoDraw(self.auto.lower())
