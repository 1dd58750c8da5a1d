"""The background process that executes a sheet: `python -m quantexp_launchers.local.background SHEET`.

It prints the same as a foreground sweep without a terminal. SIGTERM cancels its running runs and leaves the pending
ones pending; if it is killed, its running runs end too. It ignores SIGHUP, which a closed terminal or a logout sends.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from quantexp.errors import QuantexpError
from quantexp.terminal.console import pipe_console
from quantexp.terminal.messages import complain
from quantexp_launchers.local.sheet import read_sheet
from quantexp_launchers.local.slots import slots_for
from quantexp_launchers.local.submit import work_through


def main(argv: list[str] | None = None) -> int:
    """Execute the sheet; exit codes are those of `quantexp`."""
    parser = argparse.ArgumentParser(
        prog="python -m quantexp_launchers.local.background", description=__doc__
    )
    parser.add_argument("sheet", type=Path)
    try:
        sheet = read_sheet(parser.parse_args(argv).sheet)
        slots = slots_for([item.experiment for item in sheet.items])
        return work_through(sheet, slots, pipe_console())
    except QuantexpError as error:
        complain(error.message, error.listed)
        return 1
    except KeyboardInterrupt:
        complain("interrupted")
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its workers inherit this
    sys.exit(main())
