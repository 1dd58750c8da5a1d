"""A launch script as users of an installed megatron.training write it: a GPT model and random tokens, from 0.17 on.

Every rank makes all tokens itself, so that none is sent.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer.spec_utils import import_module
from megatron.training import arguments, get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from torch import Tensor
from torch.utils.data import Dataset


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Sequences of random tokens, each from a seed of its own."""

    def __init__(self, number: int, length: int, vocabulary: int) -> None:
        self.number, self.length, self.vocabulary = number, length, vocabulary

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(int(index))
        tokens = torch.randint(self.vocabulary, (self.length + 1,), generator=drawn)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self.length),
            "position_ids": torch.arange(self.length),
        }


def datasets(numbers: list[int], vp_stage: int | None = None) -> list[RandomTokens | None]:
    """Training, validation and test data, each if any is needed."""
    args = get_args()
    return [
        RandomTokens(number, args.seq_length, args.vocab_size) if number else None
        for number in numbers
    ]


datasets.is_distributed = True  # type: ignore[attr-defined]


def model(pre_process: bool = True, post_process: bool = True, **others: Any) -> GPTModel:
    """A stage of the model, with the layers of --spec or Megatron's own local ones."""
    args = get_args()
    config = others.pop("config", None) or core_transformer_config_from_args(args)
    if args.spec is not None:
        spec = import_module(args.spec)
    elif args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
    return GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        **others,
    )


def of_context_rank(x: Tensor) -> Tensor:
    """The first and last chunk of a sequence that this context-parallel rank has."""
    chunks = x.chunk(2 * mpu.get_context_parallel_world_size(), dim=1)
    rank = mpu.get_context_parallel_rank()
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)


def forward_step(data: Any, chunk: Any) -> tuple[Tensor, Any]:
    """The losses of one micro-batch, and the function that sums them."""
    batch = {name: of_context_rank(value) for name, value in next(data).items()}
    mask = batch["loss_mask"]
    output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss, mask)


def loss(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of losses, number of tokens, and both for the log."""
    total, number = (output.float() * mask).sum(), mask.sum().int()
    return total, number, {"lm loss": torch.stack([total.detach(), number.float()])}


def main() -> None:
    """Train; a version before 0.18 parses its arguments in `pretrain`, and one from 0.19 on builds the model itself."""
    words: dict[str, Any] = {}
    if "cfg_container" in inspect.signature(pretrain).parameters:
        from megatron.training import argument_utils

        args = arguments.parse_and_validate_args()
        build = getattr(argument_utils, "gpt_config_from_args", lambda args: None)
        words["cfg_container"] = argument_utils.pretrain_cfg_container_from_args(args, build(args))
    pretrain(
        **words,
        train_valid_test_dataset_provider=datasets,
        model_provider=model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


if __name__ == "__main__":
    main()
