"""Quantised training in an unmodified Megatron-LM, and weights from and to its checkpoints.

docs/megatron_lm.md is its manual. `quantexp.megatron_lm` has the names that its users write.
"""

from quantexp.extra import Extra, Service

EXTRA = Extra(
    services={
        Service.LAYER_SPEC: "quantexp.extras.megatron_lm.spec:build_spec",
        Service.SCRIPT: "quantexp.extras.megatron_lm.script:main",
        Service.READER: "quantexp.extras.megatron_lm.checkpoint_reader:reader_of",
        Service.WRITER: "quantexp.extras.megatron_lm.checkpoint_writer:write_checkpoint",
    }
)
