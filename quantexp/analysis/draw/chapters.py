"""Every chapter that looks at many tensors together, in the order in which they are drawn."""

from __future__ import annotations

from quantexp.analysis.draw.chapter import Chapter

CHAPTERS: tuple[Chapter, ...] = ()
