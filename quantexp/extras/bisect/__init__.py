"""`quantexp bisect`: the slots that a run's trouble comes from, by replays or by gradients of one iteration."""

from quantexp.extra import Extra, Service
from quantexp.extras.bisect.arguments import BISECT

EXTRA = Extra(
    {"bisect": BISECT},
    {
        Service.GRADIENT_RUN: "quantexp.extras.bisect.gradient_run:compare_gradients",
        Service.GRADIENT_COMPARISON: "quantexp.extras.bisect.gradient_run:compare_in_loop",
    },
)
