"""A decoder's shapes and counts, and its checkpoints, computed without building a model."""
