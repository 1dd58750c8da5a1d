"""The parts of the tree of `quantexp draw`, by their names in the output folder. Needs no torch and no matplotlib."""

from __future__ import annotations

#: One picture of each run.
QUICK = "quick_analysis"
#: Ends its name where filters chose the tensors: the run's own picture stays as it is.
FILTERED = ".filtered"
DISTRIBUTIONS = "distributions"
HEATMAPS = "heatmaps"
#: Folders with a figure for each tensor.
FIGURES = (DISTRIBUTIONS, HEATMAPS)
STATISTICS = "statistics"
#: The folders of the chapters in drawing order; the first two take their numbers from all measures of each tensor.
MEASURED = ("numerics", "comparisons")
CHAPTER_FOLDERS = (*MEASURED, "attention_maps")
#: The values of `--only`.
PARTS = (QUICK, *FIGURES, STATISTICS, *CHAPTER_FOLDERS)
