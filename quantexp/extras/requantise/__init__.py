"""Scores a high-precision capture offline under every format and option, and recommends a scheme.

candidates   formats with their options, and what an element costs
scoring      what a candidate leaves of an operand
exponent     the same against the scale: block exponents off the rule's, other targets of a tensor's amax
passing      all files, several at a time; what cannot be read is named and the rest goes on
tally        the worst tensor of every module, slot and candidate
recommend    the cheapest candidate of each slot that reaches an SQNR
scheme_file  that recommendation as a scheme that runs
"""

from quantexp.extra import Extra
from quantexp.extras.requantise.arguments import REQUANTISE

EXTRA = Extra({"requantise": REQUANTISE})
