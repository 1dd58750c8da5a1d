"""`quantexp gradient`: the errors of schemes' gradients against those in fp32, at checkpoints of runs.

design      which runs, checkpoints, schemes and batches      estimates   error, squared bias and variance from sums
passes      a seed's gradients, in a process of its own       results     results.jsonl
outcome     verdicts over seeds                               plan        passes, time, memory
table       what is printed                                   figure      what is drawn
"""
