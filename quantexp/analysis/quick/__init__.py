"""The quick analysis: one picture of one or several runs."""
