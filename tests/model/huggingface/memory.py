"""The memory needed to load weights, measured in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from quantexp.schema import Precision
from quantexp.training.megatron.model import build_model
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import stock_spec
from tests.model.huggingface.published import as_model, training
from tests.training.megatron.whole_models import load


def peak_bytes() -> int:
    (line,) = (
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def bytes_of_loading(folder: Path, config: dict[str, Any]) -> int:
    """The growth of the peak resident set while the weights in `folder` are loaded."""
    model = as_model(config, init_from=str(folder))
    with session(training()):
        before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")
        gpt, _ = build_model(model, training(Precision.bf16), stock_spec(model))
        load(gpt, model)
        grown = peak_bytes() - before
    assert all(bool((p == 1).all()) for p in gpt.parameters())
    return grown
