"""For Megatron-LM on a CPU, and for the processes that it spawns: a module that imports triton unguarded."""

import sys
from types import ModuleType

_kernels = ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")
_kernels.enable_batch_invariant_mode = lambda: None  # type: ignore[attr-defined]
sys.modules[_kernels.__name__] = _kernels
