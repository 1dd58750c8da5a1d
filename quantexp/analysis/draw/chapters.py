"""All chapters in drawing order."""

from __future__ import annotations

from quantexp.analysis.chapter import Chapter
from quantexp.analysis.numerics.attention_chapter import CHAPTER as ATTENTION_MAPS
from quantexp.analysis.numerics.chapter import CHAPTER as NUMERICS
from quantexp.analysis.numerics.comparison_chapter import CHAPTER as COMPARISONS

CHAPTERS: tuple[Chapter, ...] = (NUMERICS, COMPARISONS, ATTENTION_MAPS)
