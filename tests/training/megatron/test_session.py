"""A session frees everything of its run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from quantexp.schema import Experiment
from quantexp.training.megatron.session import session


def test_rotary_embedding_is_freed_with_its_process_group(
    tiny: Callable[..., Experiment],
) -> None:
    """Megatron's cache of embedding outputs also references the embedding."""
    with session(tiny().training):
        embedding = RotaryEmbedding(32, 1.0, use_cpu_initialization=True)
        assert isinstance(embedding(8), torch.Tensor)
        freed = weakref.ref(embedding)
        del embedding
        assert freed() is not None, "cached"
    gc.collect()
    assert freed() is None
