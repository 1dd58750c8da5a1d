"""Seeds may be added until a design decides, if its looks are planned before the first one.

Whoever tests again after each new seed finds a difference by chance sooner or later. A plan of looks (`--looks
8,16,24`, numbers of seeds) divides the 5% among them: look k has the level alpha(n_k) - alpha(n_{k-1}) with

    alpha(n) = 2 - 2 Phi(z sqrt(N / n))      z = Phi^-1(0.975), N seeds at the last look

(Lan and DeMets, Biometrika 70(3), 1983; the function like O'Brien and Fleming's). The levels add up to 5%, so that
false alarms keep it however the looks depend on each other. The plan is in looks.json of the design's folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

from quantexp.analysis.compare.noise import FEWEST_ALONE, LEVEL
from quantexp.errors import ConfigError
from quantexp.extras.resolve.request import numbers
from quantexp.reading.json_files import read_json
from quantexp.runs.disk import write_whole

NAME = "looks.json"


def level(looks: Sequence[int], number: int) -> float | None:
    """The level of a test at so many seeds; None if the plan has no look there. Without a plan it is `LEVEL`."""
    if not looks:
        return LEVEL
    if number not in looks:
        return None
    earlier = [n for n in looks if n < number]
    return _spent(number, looks[-1]) - (_spent(earlier[-1], looks[-1]) if earlier else 0.0)


def _spent(number: int, last: int) -> float:
    normal = NormalDist()
    return 2 * normal.cdf(normal.inv_cdf(LEVEL / 2) * math.sqrt(last / number))


def looks_of(folder: Path, given: str | None, seeds_seen: int, *, is_dry: bool) -> tuple[int, ...]:
    """The plan of a design's folder; `given` (`8,16,24`) makes one where there is none, written unless `is_dry`.

    `seeds_seen` seeds have results, which may have been judged.

    Raises:
        ConfigError: a look has fewer seeds than a verdict needs; the folder has another plan; or results were there
            before it.
    """
    file = folder / NAME
    known = tuple(read_json(file, list[int])) if file.is_file() else ()
    if given is None:
        return known
    looks = numbers("looks", given)
    if looks[0] < FEWEST_ALONE:
        raise ConfigError(
            f"--looks must be numbers of seeds from {FEWEST_ALONE} on, got {given}: fewer tell nothing"
        )
    if known and looks != known:
        raise ConfigError(
            f"--looks {given}: {folder} was planned with --looks {','.join(map(str, known))}; leave the flag out, or "
            "take another folder (out=FOLDER)"
        )
    if not known and seeds_seen >= FEWEST_ALONE:
        raise ConfigError(
            f"--looks {given}: {folder} has results of {seeds_seen} seeds, which may have been judged before this "
            "plan; take another folder (out=FOLDER)"
        )
    if not known and not is_dry:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(looks))
    return looks
