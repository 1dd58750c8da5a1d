"""Quantisation kernels: compiled code for each device, exact for everything it claims.

    choice    selects the kernel
    cpu       C, compiled on first use (cpu.c)
    gpu       Triton, on CUDA devices

The torch code of `quantexp.formats` is the reference and handles what no kernel claims. A kernel's values equal the
reference's bit for bit; all NaN count as equal.
"""
