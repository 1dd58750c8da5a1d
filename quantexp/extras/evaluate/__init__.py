"""`quantexp evaluate`: given weights on held-out text and tasks under a scheme and in bf16, without training."""

from __future__ import annotations

import argparse

from quantexp.cli.flags import add_json, add_train
from quantexp.extra import Extra, Service, Verb


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_train(parser)
    add_json(parser)


EVALUATE = Verb(
    "evaluate given weights on held-out text, without training",
    "[-m] [--json] [RUN@ITERATION] group=choice key=value ... [out=FOLDER]",
    (
        "evaluate bf16-1a2b3c4d@600 quant=linear_mxfp4",
        "evaluate -m model.init_from=llama dataset.path=text 'quant=glob(*)'",
        "evaluate model.init_from=llama evaluate.each_layer=true quant=mine",
        "evaluate model.init_from=llama tasks=arc_easy quant=linear_mxfp4",
    ),
    "Loss, perplexity and top token under a scheme, and the difference to the same\n"
    "weights in bf16 on the same evaluation.samples x training.seq_length tokens.\n"
    "RUN@ITERATION: the weights of a checkpoint, with the run's model and data.\n"
    "evaluate.each_layer=true and evaluate.each_module=true: one alone, in turn.\n"
    "tasks=A,B: also tasks of lm-evaluation-harness (quantexp[lm-eval]).",
    module="quantexp.extras.evaluate.verb",
    add_arguments=_add_arguments,
)

EXTRA = Extra(
    {"evaluate": EVALUATE},
    {
        Service.EVALUATION_RUN: "quantexp.extras.evaluate.evaluation_run:evaluate_run",
        Service.EVALUATION_FIGURE: "quantexp.extras.evaluate.figure:draw_run",
    },
)
