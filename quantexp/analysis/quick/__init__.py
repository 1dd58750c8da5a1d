"""The quick analysis: one picture of a run, or of several."""
