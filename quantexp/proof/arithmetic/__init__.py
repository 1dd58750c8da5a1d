"""The arithmetic of number formats once more, for the proof of engagement.

A fault in the code that quantises must not change what the proof expects. These modules therefore import from
`quantexp.formats` only the types and constants that describe formats, and compute their definitions in other ways:

    rounding    v is divided by the spacing of its binade, rounded to an integer and multiplied; a list of values is
                searched
    scales      a power of two by comparing the mantissa of amax with a threshold, others by searching their values; the
                scale of a tensor in Python's floats
    levels      groups that double a block's scale are found by their binades; corrections from sums of integers
    transform   stages of constant geometry (Pease, J. ACM 15, 1968)
    philox      Philox4x32-10 for each position
    tables      images of 16-bit codes, which a few lines of C look up
"""
