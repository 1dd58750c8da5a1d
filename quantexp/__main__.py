"""`python -m quantexp` is the command `quantexp`."""

import sys

from quantexp.cli.main import main

sys.exit(main())
