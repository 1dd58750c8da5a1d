"""A program that calls a module's functions in Triton's interpreter, on a CPU, for tests in another process.

Triton decides when a kernel's module is imported whether it is compiled or interpreted, by TRITON_INTERPRET, and for
all kernels of the process alike. The module is named on the command line; requests (a function's name, its arguments,
attributes of the module while it is called) and answers are pickles on stdin and stdout. A function that returns
nothing answers with its arguments.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from unittest.mock import patch


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr
    while True:
        try:
            name, arguments, attributes = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        with patch.dict(vars(module), attributes):
            result = getattr(module, name)(*arguments)
        pickle.dump(arguments if result is None else result, answers)
        answers.flush()


if __name__ == "__main__":
    main()
