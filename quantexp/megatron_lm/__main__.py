"""`python -m quantexp.megatron_lm pretrain_gpt.py ...`: Megatron-LM's script, with quantexp's words among its own."""

import sys

from quantexp.errors import QuantexpError
from quantexp.extra import Service, required

if __name__ == "__main__":
    try:
        run = required(Service.SCRIPT, "python -m quantexp.megatron_lm")
    except QuantexpError as error:
        raise SystemExit(f"quantexp: {error}") from None
    run(sys.argv[1:])
