"""The parts of a slot: what they resolve to, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.formats.types import Axis, Take
from quantexp.quant.records import part_words, spec_record
from quantexp.quant.sites import DGRAD_Q_K, FPROP_K, FPROP_X, Site
from quantexp.quant.slots import resolve_site
from quantexp.schema import LinearFprop, LinearSite, LinearWgrad, Part, QkFprop, QkSite, Slot

MEAN = "{take: mean, along: tokens, format: bf16}"


def refusal(*parts: Part, **options: Any) -> str:
    site = LinearSite(format="mxfp4", fprop=LinearFprop(x=Slot(parts=list(parts), **options)))
    with pytest.raises(ConfigError) as caught:
        resolve_site(Site.LINEAR, site)
    return str(caught.value)


def test_a_part_has_its_own_format_along_the_products_axis() -> None:
    parts = [
        Part("mean", "tokens", format="bf16"),
        Part("channels", "tokens", number=3, from_error=True, format="mxfp8"),
    ]
    parts += [Part("low_rank", number=5, format="bf16"), Part("low_rank", share=0.1, format="bf16")]
    site = LinearSite(format="mxfp4", fprop=LinearFprop(x=Slot(parts=parts)))
    mean, channels, low_rank, _ = resolve_site(Site.LINEAR, site)[FPROP_X].parts
    assert (mean.take, mean.along, mean.spec.quantised) == (Take.MEAN, Axis.TOKENS, False)
    assert (channels.spec.fmt.name, channels.spec.axis) == ("mxfp8_e4m3", Axis.INPUT_WIDTH)
    records: Any = spec_record(resolve_site(Site.LINEAR, site)[FPROP_X])["parts"]
    assert list(map(part_words, records)) == [
        "mean along tokens",
        "largest 3 channels along tokens of the error",
        "rank 5",
        "rank 0.1 of full",
    ]
    assert (low_rank.take, low_rank.along, low_rank.number) == (Take.LOW_RANK, None, 5)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part(), "parts[0].take must be one of mean, channels, elements, low_rank, got None"),
        (Part("mean"), "parts[0].along must be an axis of x, tokens or input_width, got None"),
        (Part("mean", "output_width"), "along must be an axis of x, tokens or input_width, got"),
        (Part("mean", "tokens", number=3), "number has no meaning with take=mean, got 3"),
        (Part("elements", "tokens"), "along has no meaning with take=elements, got tokens"),
        (Part("elements"), "must have a number of elements or their share of all, and not both"),
        (Part("channels", "tokens", 3, 0.5), "got number=3 and share=0.5"),
        (Part("low_rank", "tokens", 3), "along has no meaning with take=low_rank, got tokens"),
        (Part("low_rank"), "must have a number of dimensions or their share of all, and not both"),
        (Part("mean", "tokens"), "parts[0].format must be one of bf16, bfloat16, "),
        (Part("mean", "tokens", format="reuse"), "got 'reuse'"),
        (Part("mean", "tokens", format="nvfp4_16x16"), "must round to nearest, in blocks of one"),
    ],
    ids=str,
)
def test_a_part_that_is_none_is_refused(part: Part, words: str) -> None:
    message = refusal(part)
    assert message.startswith("quant.linear.fprop.x.parts[0]")
    assert words in message


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hadamard": "random"}, "hadamard: a part is not transformed, so the transforms"),
        (
            {"pre_scale": True},
            "pre_scale: its inverse would also multiply the products of the parts",
        ),
        ({"clip_gradient": True}, "clip_gradient: what saturates is the remainder"),
        ({"format": "fp8", "scaling": "delayed"}, "scaling=delayed: its history would be that"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_parts_are_refused(options: dict[str, Any], why: str) -> None:
    site = LinearSite(format="mxfp4", **{k: v for k, v in options.items() if k == "hadamard"})
    site.fprop.x = Slot(parts=[Part("mean", "tokens", format="bf16")], **options)
    if options.get("format") == "fp8":
        site.fprop.x.format = "fp8_e4m3"
    with pytest.raises(ConfigError) as caught:
        resolve_site(Site.LINEAR, site)
    assert f"quant.linear.fprop.x.parts of linear.fprop.x do not go with {why}" in str(caught.value)


def test_parts_of_the_forward_copy_and_a_copy_that_is_a_sum_are_refused() -> None:
    mean = [Part("mean", "tokens", format="bf16")]
    site = LinearSite(format="mxfp4")
    site.wgrad.x = Slot(of="forward", parts=mean)
    with pytest.raises(
        ConfigError, match="do not go with of=forward: parts are taken of the tensor in high"
    ):
        resolve_site(Site.LINEAR, site)
    site.wgrad.x, site.fprop.x = Slot(of="forward"), Slot(parts=mean)
    with pytest.raises(ConfigError, match="the forward copy of x is a sum of parts along"):
        resolve_site(Site.LINEAR, site)


def test_high_precision_the_forward_copy_and_attention_have_no_parts() -> None:
    mean = [Part("mean", "tokens", format="bf16")]
    words = (
        r"parts does not apply to bf16, got \[{take: mean, along: tokens, format: bf16}\]; remove"
    )
    with pytest.raises(ConfigError, match=words):
        resolve_site(Site.LINEAR, LinearSite(fprop=LinearFprop(x=Slot(parts=mean))))
    reused = LinearSite("mxfp4", fprop=LinearFprop(x=Slot(parts=mean)))
    reused.wgrad = LinearWgrad(x=Slot("reuse"))
    with pytest.raises(ConfigError, match="the forward copy of x is a sum of parts along"):
        resolve_site(Site.LINEAR, reused)
    with pytest.raises(
        ConfigError,
        match=r"parts\[0\] of qk.fprop.k must be \{take: mean, along: keys, format: none\}",
    ):
        resolve_site(Site.QK, QkSite("mxfp4", fprop=QkFprop(k=Slot(parts=mean))))


@pytest.mark.parametrize("slot", ["fprop.q", "dgrad_q.dS", "dgrad_k.q"])
def test_a_mean_is_left_out_of_keys_alone(slot: str) -> None:
    site, (product, operand) = QkSite("mxfp4"), slot.split(".")
    setattr(getattr(site, product), operand, Slot(parts=[Part("mean", "keys", format="none")]))
    with pytest.raises(ConfigError, match=f"and for qk.fprop.k, got them for qk.{slot}"):
        resolve_site(Site.QK, site)
    error = Part("mean", "keys", from_error=True, format="none")
    with pytest.raises(ConfigError, match="from_error=true and format=none"):
        resolve_site(Site.QK, QkSite("mxfp4", fprop=QkFprop(k=Slot(parts=[error]))))
    assert "format must be one of" in refusal(Part("mean", "tokens", format="none"))


def test_a_key_without_its_mean_may_be_transformed_and_is_repeated_by_its_copy() -> None:
    site = QkSite("mxfp4", hadamard="random")
    site.fprop.k = Slot(parts=[Part("mean", "keys", format="none")])
    site.dgrad_q.k = Slot("mxfp4", hadamard="random")
    resolved = resolve_site(Site.QK, site)
    assert resolved[FPROP_K].num_pieces == 1
    smooth = compose(["quant=more/FA_mxint8_smooth_k"], None, {}).quant.qk
    assert resolve_site(Site.QK, smooth)[DGRAD_Q_K].parts == resolved[FPROP_K].parts


def test_an_empty_list_takes_parts_away() -> None:
    words = ("quant=more/linear_nvfp4_averis", "quant.rules=[{layers: [0], parts: []}]")
    from quantexp.quant.precision import precision_map

    experiment = compose(list(words), None, {})
    declared = precision_map(experiment.model, experiment.quant)
    layers = {
        entry.module.layer: len(entry.spec.parts)
        for module in declared.values()
        for entry in module.entries()
        if entry.slot == FPROP_X
    }
    assert layers[0] == 0
    assert layers[1] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model=deepseek2_lite", "quant=more/linear_nvfp4_averis"],
            "must have no parts: an expert has the tokens that the router sends",
        ),
        (
            ["quant=linear_mxfp4", f"quant.output.fprop.w={{format: mxfp4, parts: [{MEAN}]}}"],
            "quant.output.fprop.w.parts[0].along must be an axis of w, input_width or output_width",
        ),
        (
            [
                "quant=linear_mxfp4",
                "quant.output.fprop.w={format: mxfp4, parts: [{take: elements, number: 4, format: bf16}]}",
            ],
            "quant.output.fprop.w must have no parts in a model with model.tie_embeddings=true",
        ),
        (
            ["quant=more/linear_nvfp4_averis", "quant.backend=te_emulated"],
            "is a sum of parts, and Transformer Engine multiplies one tensor an operand",
        ),
        (
            [
                *("quant=more/linear_nvfp4_averis", "parallel.context=2"),
                "launcher.num_processes=2",
            ],
            "parallel.context=2 must leave the blocks of every slot as in one process",
        ),
        (
            [
                *("quant=more/linear_mxfp4_outliers", "parallel.tensor=2"),
                "launcher.num_processes=2",
            ],
            "fc2 (parts of whole operands)",
        ),
        (
            ["quant=more/linear_nvfp4_metis", "parallel.tensor=2", "launcher.num_processes=2"],
            "fc2 (parts of whole operands)",
        ),
        (
            ["quant.linear.fprop.x.parts=[{tak: mean}]"],
            "unknown key quant.linear.fprop.x.parts[0].tak",
        ),
        (["quant.linear.fprop.x.parts=[3]"], "parts[0] must be keys with values, in braces"),
        (
            ["quant.linear.fprop.x.parts=[{take: elements, share: 1.5}]"],
            "quant.linear.fprop.x.parts[0].share must lie between 0 and 1, got 1.5",
        ),
    ],
    ids=str,
)
def test_what_does_not_compose_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words, None, {})
    assert message in str(caught.value)


def test_means_over_tokens_are_those_of_one_process_under_tensor_parallelism() -> None:
    words = ["quant=more/linear_nvfp4_averis", "parallel.tensor=2", "launcher.num_processes=2"]
    assert compose(words, None, {}).parallel.tensor == 2
