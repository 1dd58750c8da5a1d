"""Processes on this machine: children, threads, cores, memory, compiled code."""
