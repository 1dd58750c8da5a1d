"""What a rank sets up before it trains or evaluates: memory check, data, process groups, the record of what ran."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quantexp.folders import cache_dir
from quantexp.formats.certificate import standing
from quantexp.memory.room import require_memory_here
from quantexp.model.layout import Layout
from quantexp.runs.provenance import add_what_ran, read_provenance
from quantexp.runs.status import Phase
from quantexp.training.context import RunContext

if TYPE_CHECKING:
    import torch

    from quantexp.training.megatron.data_loader import RankBatches


LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def rank_session(context: RunContext) -> Iterator[tuple[torch.device, RankBatches]]:
    """Yield the device and this rank's micro-batches, inside Megatron's session; standard output goes to the log.

    Raises:
        RunError: the run does not fit into this machine's memory.
        DataError: data is missing or damaged.
    """
    from quantexp.training.megatron.without_te import import_megatron

    import_megatron()
    import torch

    from quantexp.training.megatron.data_loader import data_of, rank_batches
    from quantexp.training.megatron.device import device_name
    from quantexp.training.megatron.session import products_of, session

    experiment = context.experiment
    training, launcher = experiment.training, experiment.launcher
    require_memory_here(experiment)
    context.set_phase(Phase.READING_DATA)
    if launcher.num_threads is not None:
        torch.set_num_threads(launcher.num_threads)
    prefixes, tokenizer = data_of(experiment)
    layout = Layout.of(experiment)
    process = session(training, context.rank, launcher.timeout_min, layout)
    with process as device, contextlib.redirect_stdout(sys.stderr):
        if context.rank.leads:
            certificate = standing(cache_dir(experiment.paths.cache), device.type)
            products = products_of(training, device)
            provenance = context.run.provenance
            add_what_ran(provenance, device_name(device), certificate.record(), products)
            for start in read_provenance(provenance).get("starts", ()):
                if changed := ", ".join(start["changed"]):
                    LOG.info(
                        f"went on from iteration {start['goes_on_from']} with changes: {changed}"
                    )
        batches = rank_batches(experiment, context.rank, prefixes, tokenizer, start=context.start)
        context.set_phase(Phase.BUILDING)
        yield device, batches
