"""`quantexp evaluate`: given weights on held-out text and tasks under a scheme and in bf16, without training."""

from quantexp.extra import Extra, Service
from quantexp.extras.evaluate.arguments import EVALUATE

EXTRA = Extra(
    {"evaluate": EVALUATE},
    {
        Service.EVALUATION_RUN: "quantexp.extras.evaluate.evaluation_run:evaluate_run",
        Service.EVALUATION_FIGURE: "quantexp.extras.evaluate.figure:draw_run",
    },
)
