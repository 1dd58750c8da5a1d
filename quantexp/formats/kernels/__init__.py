"""Kernels that move tensors to a format's grid: compiled ones for devices, each exact in all that it claims.

    choice    which one is used
    cpu       C, compiled on first use (cpu.c)
    gpu       Triton, on CUDA devices

What no kernel claims is left to the torch code of `quantexp.formats`, which is the reference: a kernel gives the same
values to the last bit, a NaN being as good as any other.
"""
