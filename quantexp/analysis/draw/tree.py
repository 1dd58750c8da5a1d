"""The parts of what `quantexp draw` draws, by their names below the output folder. Needs no torch and no matplotlib."""

from __future__ import annotations

#: One picture of each run.
QUICK = "quick_analysis"
#: Ends its name where filters chose the tensors: the run's own picture, and its numbers, stay as they are.
FILTERED = ".filtered"
DISTRIBUTIONS = "distributions"
HEATMAPS = "heatmaps"
#: Folders with a figure for each tensor.
FIGURES = (DISTRIBUTIONS, HEATMAPS)
STATISTICS = "statistics"
#: Folders that look at many tensors together (`quantexp.analysis.draw.chapters`), in the order in which they are drawn.
CHAPTER_FOLDERS = ("numerics", "comparisons", "attention_maps")
#: What `--only` takes.
PARTS = (QUICK, *FIGURES, STATISTICS, *CHAPTER_FOLDERS)
