"""Runs Megatron-LM's own script on a CPU: `python run.py CHECKOUT pretrain_gpt.py ...`, or `-m MODULE ...`.

What is replaced asks for CUDA, compiles kernels or a dataset helper; no number is changed.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any


def main(checkout: Path, words: list[str]) -> None:
    """Run a script of the checkout, or a module, with the words after it as its arguments."""
    sys.path.insert(0, str(checkout))
    import torch

    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1
    cuda.set_device = lambda device: None

    import megatron.core.datasets.utils
    import megatron.core.transformer.moe.moe_utils
    import megatron.training.arguments
    import megatron.training.initialize
    import megatron.training.training

    from quantexp.training.megatron.cpu import cpu_device
    from quantexp.training.megatron.without_te import complete_megatron

    training: Any = megatron.training.training
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    megatron.core.datasets.utils.compile_helpers = lambda: None
    with contextlib.suppress(ImportError):  # 0.15 and 0.16
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda args: None
    megatron.training.arguments.get_device_arch_version = lambda: 9
    complete_megatron()
    if plant := os.environ.get("QUANTEXP_TEST_PLANT"):
        runpy.run_path(plant)
    with cpu_device():
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [str(checkout / words[0]), *words[1:]]
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
