"""`quant.backend=transformer_engine` and `te_emulated`: Transformer Engine's linear layers, their plan and proof.

scheme       what of a scheme its recipes hold, how near, and on which hardware; without importing it
machine      what a run lacks on its machine
planning     the part of a plan
rank         its linear layers in Megatron's model
proof        operands as it stores them, compared with the declared slots
conformance  its quantizers against the formats of the schemes
"""

from quantexp.extra import Extra, Service

_OWN = "quantexp.extras.transformer_engine"

EXTRA = Extra(
    services={
        Service.BACKEND_CHECK: f"{_OWN}.scheme.checking:check_backend",
        Service.BACKEND_LACKS: f"{_OWN}.planning:missing_for_backend",
        Service.BACKEND_PLAN: f"{_OWN}.planning:backend_plan",
        Service.BACKEND_RECIPES: f"{_OWN}.planning:recipes_by_module",
        Service.DEVICE: f"{_OWN}.planning:device_named",
        Service.DEVICES: f"{_OWN}.planning:devices",
        Service.BACKEND_SUPPORT: f"{_OWN}.rank.support:support_in_words",
        Service.NATIVE_SPEC: f"{_OWN}.rank.specs:native_spec",
        Service.NATIVE_DECODER: f"{_OWN}.rank.recipes:decoder_of_new_model",
        Service.NATIVE_WATCH: f"{_OWN}.rank.gemm_watch:watching",
        Service.CONFORMANCE: f"{_OWN}.verify:run",
    }
)
