"""A decoder's shapes and counts, and its checkpoints, without a model being built."""
