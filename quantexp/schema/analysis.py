"""The configuration of what is made of a run once it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AutoDraw(Enum):
    """What is drawn after a run."""

    everything = "true"
    quick = "quick"
    nothing = "false"


@dataclass
class AnalysisConfig:
    """What is drawn after a run."""

    #: quick: figures/quick_analysis.png and report.html; true: the whole tree of `quantexp draw`, as PNG, too;
    #: false: nothing.
    auto: str = "quick"

    @property
    def drawing(self) -> AutoDraw:
        """What `auto` says; it is a word for OmegaConf, since an enumeration takes no `true`.

        Raises:
            ValueError: anything else.
        """
        return AutoDraw(self.auto.lower())
