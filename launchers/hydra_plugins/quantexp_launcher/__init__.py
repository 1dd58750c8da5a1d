"""Hydra's launcher for quantexp: `hydra/launcher=quantexp`, the default of the shipped configuration."""
