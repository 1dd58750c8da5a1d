"""Analyses the captured tensors and the metrics of a run: statistics, quantisation error, figures.

Reads run folders and capture folders only; knows neither Megatron nor Hydra.
"""
