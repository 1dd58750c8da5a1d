"""Makes Transformer Engine's own Python importable, and its modules runnable, on a machine without CUDA.

`install()` puts the unpacked wheel on the path and stand-ins in the place of its native library and of packages that
only its kernels need. All else, from recipes to `te.Linear`, is Transformer Engine's. A function of the native
library returns a mock, unless a test gives it one: `transformer_engine_torch.generic_gemm = ...`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

#: What `transformer_engine_torch` has as types rather than functions.
ENUMS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT "
    "GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT",
    "CommOverlapType": "RS AG",
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
}
CLASSES = ("CommOverlapHelper", "CommOverlap", "CommOverlapP2P", "CommOverlapAlgo")
#: Packages that are needed for kernels and exports alone; stand-ins where they are not installed.
UNUSED = ("triton", "triton.language", "onnx", "onnxscript", "einops")

#: The compute capability that the machine pretends to have.
_capability = [(10, 0)]


class _Native(types.ModuleType):
    """`transformer_engine_torch`: what no test needs is a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"transformer_engine_torch.{name}")


class _UnusedPackage(MagicMock):
    __version__ = "3.0.0"
    __path__: tuple[str, ...] = ()
    __all__ = ()


def install(wheel: Path) -> None:
    """Import Transformer Engine from an unpacked wheel; once in a process, before Megatron-Core is imported."""
    import torch
    import torch._dynamo  # before stand-ins, which it would take for the packages

    native = _Native("transformer_engine_torch")
    for name, members in ENUMS.items():
        setattr(native, name, enum.IntEnum(name, members, start=0))
    # A member that later versions, which compare the members with theirs, no longer have.
    native.NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen = 3
    for name in CLASSES:
        setattr(native, name, type(name, (), {}))
    native.get_cublasLt_version = lambda: 130000  # type: ignore[attr-defined]
    sys.modules["transformer_engine_torch"] = native
    for name in [name for name in UNUSED if importlib.util.find_spec(name) is None]:
        package = _UnusedPackage(name=name)
        package.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = package
    sys.path.insert(0, str(wheel))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # load no library
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common

        transformer_engine.common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch
        import transformer_engine.pytorch.module.base as base
    torch.cuda.get_device_properties = _properties
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.version.cuda = "13.0"
    distributed: Any = torch.distributed
    distributed._coalescing_manager = _coalescing(distributed._coalescing_manager)
    torch.Tensor.is_cuda = property(_is_cuda)  # type: ignore[assignment]
    base.torch = _Seen(torch, cuda=_Seen(torch.cuda, is_available=lambda: True))


def _properties(device: object = None) -> Any:
    major, minor = _capability[0]
    return types.SimpleNamespace(major=major, minor=minor, multi_processor_count=132)


def _coalescing(original: Any) -> Any:
    """Collectives of a device, which NCCL begins together and gloo refuses, complete one by one."""

    @contextlib.contextmanager
    def one_by_one() -> Iterator[Any]:
        yield types.SimpleNamespace(wait=lambda: None)

    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return original(group, None, async_ops) if device is None else one_by_one()

    return manager


class _Seen:
    """A module with a few names replaced, for one importer alone."""

    def __init__(self, module: types.ModuleType, **replaced: object) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _is_cuda(x: Any) -> bool:
    """True for Transformer Engine, which refuses other tensors, and False for everything else."""
    return str(sys._getframe(1).f_globals["__name__"]).startswith("transformer_engine.")


@contextlib.contextmanager
def machine(capability: tuple[int, int]) -> Iterator[None]:
    """Pretend a compute capability; what Transformer Engine remembers of devices and recipes is forgotten."""
    from transformer_engine.pytorch import quantization, utils

    from quantexp.training.megatron.cpu import cpu_device

    _capability[0] = capability
    for module in (utils, quantization):
        for value in vars(module).values():
            if isinstance(value, _lru_cache_wrapper):
                value.cache_clear()
    quantization.FP8GlobalStateManager.reset()
    with cpu_device():
        yield
