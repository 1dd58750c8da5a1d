"""Processes of this machine: children, threads, cores, memory, compiled code."""
