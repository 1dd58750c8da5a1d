"""A program that runs `quantexp.formats.kernels.gpu` on a CPU, in Triton's interpreter, for tests in another process.

Triton decides when a kernel's module is imported whether it is compiled or interpreted, by TRITON_INTERPRET, and for
all kernels of the process alike. Requests and answers are pickles on stdin and stdout.
"""

from __future__ import annotations

import pickle
import sys

from quantexp.formats.kernels import gpu


def main() -> None:
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr
    grid_limit = gpu._GRID_LIMIT
    while True:
        try:
            name, arguments, limit = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        gpu._GRID_LIMIT = grid_limit if limit is None else limit
        result = getattr(gpu, name)(*arguments)
        pickle.dump(arguments if result is None else result, answers)
        answers.flush()


if __name__ == "__main__":
    main()
