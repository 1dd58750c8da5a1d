"""`python -m quantexp` is the command `quantexp`."""

import sys

from quantexp.cli import main

sys.exit(main())
