"""Runs as SLURM jobs, by submitit."""
