"""`quantexp prepare`: raw text to the pair of files that runs read, here or as jobs of a cluster.

verb      the command
divided   the parts of a preparation among jobs, and what each job executes
report    what a preparation counted, as tables and as JSON

The built-in data is prepared by the same functions (`quantexp.data.prepare`), without this extra.
"""

from __future__ import annotations

import argparse

from quantexp.cli.flags import add_json, add_overrides
from quantexp.extra import Extra, Verb


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)


PREPARE = Verb(
    "turn raw text into the tokens that runs read",
    "dataset=NAME dataset.source=FILES [dataset.key=value ...]",
    (
        "prepare dataset.source=dumps/ dataset.tokenizer_path=llama/",
        "prepare dataset=dolma dataset.source=raw/ dataset.tokenizer=byte",
        "prepare dataset.source=dumps/ launcher=slurm launcher.max_parallel=8",
    ),
    module="quantexp.extras.prepare.verb",
    add_arguments=_add_arguments,
)

EXTRA = Extra({"prepare": PREPARE})
