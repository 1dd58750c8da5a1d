"""Lies are named: other things run than the label says, and the proof ends the run in the iteration in which it begins.

The default cases are one of each kind; slow ones are one in each setting. `test_every_lie` has all, which are those of
`python benchmarks/lies.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import bench
from .bench import Status, first_difference, honest, outcome, trace
from .faults import FAULTS, Group
from .pairs import pairs
from .settings import SETTINGS, Kind

#: Faults may use what torch warns of.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

#: Fault, setting, the iteration in which it begins, and what the message names.
DEFAULT: list[tuple[str, str, int, str]] = [
    ("noise", "mxfp4", 1, "layer 0"),
    ("one scale", "mxfp4", 1, "layer 0"),
    ("half amax", "fp8", 1, "layer 0"),
    ("twice", "mxfp4", 1, "linear.wgrad.x"),
    ("of high", "of forward", 1, "it is quantised from the tensor in high precision, not from"),
    ("of another copy", "of forward drawn", 1, "linear.wgrad.x"),
    ("of high", "of stored", 1, "it is quantised from the tensor in high precision, not from"),
    ("of another copy", "of stored", 1, "elements are not those of its source"),
    ("of a copy along tokens", "of stored, of one scale", 1, "linear."),
    ("not turned back", "quartet", 1, "linear.dgrad"),
    ("clip ignored", "quartet", 1, "linear.dgrad"),
    ("not turned back", "quest", 1, "linear.wgrad"),
    ("of high in the map", "of forward", 1, "configured with of forward, and the map has high"),
    ("of high in the map", "of stored", 1, "configured with of mxfp4_e2m1, and the map has high"),
    ("stochastic", "nvfp4", 1, "linear."),
    ("fused output of originals", "mxfp8 fused", 1, "pv.fprop: it is the product of"),
    ("fused gradients of originals", "mxfp8 fused", 1, "qk.dgrad_q: it is the product of"),
    ("where nobody looks", "mxfp4", 2, "linear.fprop.x: declared mxfp4_e2m1"),
    ("kernel", "mxfp8", 1, "layer 0"),
    ("baseline quantises", "bf16", 1, "layer 0"),
    ("numpy in linear.wgrad", "mxfp4", 1, "wgrad"),
    ("thread", "mxfp4", 1, "layer 0"),
    ("numpy in qk.dgrad_k", "mxfp4", 1, "dgrad_k"),
    ("output replaced", "mxfp8", 1, "layer 0 qkv"),
    ("pv.dgrad_v.P noise", "all slots fp8", 1, "pv.dgrad_v.P"),
    ("qk.dgrad_q.dS negated", "all slots mxfp4 tiled", 1, "qk.dgrad_q.dS"),
    ("stale weights", "mxfp4", 2, "w"),
    ("micro-batch 1 zero", "mxfp4", 1, "layer"),
    ("from iteration 3", "mxfp4", 3, "layer"),
    ("unwatched", "mxfp4", 2, "layer"),
    ("dw twice in micro-batch 1", "bf16", 1, "wgrad"),
    ("scale twice", "bf16", 1, "qk.fprop"),
    ("seed 0", "sr rht", 1, "linear."),
    ("signs of iteration 1", "sr rht", 2, "linear."),
    ("history not advanced", "delayed", 3, "linear."),
    ("smaller validation loss in the line", "validation", 1, "validation_loss in metrics.jsonl is"),
    ("validation in bf16", "validation", 1, "layer"),
    ("smaller validation loss written", "validation", 1, "was written for it"),
    ("half of the held-out samples", "validation", 1, "tokens, not 256"),
    ("averaged weights in validation", "validation", 2, "of the model are not the main weights"),
    ("recomputed negated", "mxfp8 recomputed", 1, "linear.fprop.x"),
    (
        "stream behind a layer in fp8 from 2",
        "mxfp4",
        2,
        "entered the layer are not what left the one",
    ),
    ("gradient of the stream in fp8 from 3", "mxfp8 recomputed", 3, "what left the one after it"),
    ("map resolved wrongly", "mxfp4", 1, "linear.wgrad.g: configured as mxfp4_e2m1"),
    ("map with other blocks", "mxfp8", 1, "configured with block 32, and the map has 64"),
    ("map with other streams", "sr rht", 1, "configured with stream"),
    ("rule resolved wrongly", "rule at 3", 3, "configured as mxfp8_e4m3"),
    ("rule in layer 0 alone", "rule at 3", 3, "layer 1"),
    ("extra product from 2", "mxfp4", 2, "that the precision map does not list"),
    ("extra product by numpy", "mxfp4", 1, "not the sum of the stream"),
    ("norm in fp8 from 2", "bf16", 2, "not the norm of what entered it"),
    ("gradient of norms in fp8", "bf16", 1, "of the gradient that entered the norm"),
    ("embedding in fp8", "mxfp4", 1, "that left the embedding are not the rows of their tokens"),
    ("embedding of other tokens from 2", "bf16", 2, "left the embedding are not the rows"),
    ("last norm in fp8", "mxfp4", 1, "that entered the output layer are not what left the last"),
    ("logits in fp8", "mxfp4", 1, "of the logits are not the product of"),
    ("loss smaller", "mxfp4", 1, "of the loss are not the cross entropy of the logits"),
    ("other labels", "mxfp4 fp16", 1, "of the loss are not the cross entropy of the logits"),
    ("gradient of the loss in fp8", "mxfp4", 1, "of the gradient of the logits are not the loss's"),
    ("angles one early", "mxfp4", 1, "rotary angles are not those of the configuration"),
    ("angles in bf16", "bf16 fp32", 1, "rotary angles are not those of the configuration"),
    ("norm left out", "bf16", 1, "the norm before attention was not called"),
    ("history lost", "resumed delayed", 3, "its amax history did not follow"),
    ("histories exchanged", "resumed delayed", 3, "its amax history did not follow"),
    ("TE 3342", "mxfp8", 1, "linear."),
    ("parts not split off", "averis", 1, "not those of its mean along tokens"),
    ("remainder with its parts", "averis", 1, "its remainder: it is that of the whole operand"),
    ("parts in another format", "averis", 1, "its mean along tokens; it is mxfp4_e2m1"),
    ("parts left out from 3", "averis", 3, "linear."),
    ("parts not split off", "outliers", 1, "not those of its largest 0.01 of elements"),
    ("remainder with its parts", "outliers", 1, "its remainder: it is that of the whole operand"),
    ("parts in another format", "outliers", 1, "its largest 0.01 of elements"),
    ("parts not split off", "metis", 1, "not those of its rank 0.03 of full"),
    ("remainder with its parts", "metis", 1, "its remainder: it is that of the whole operand"),
    ("low rank of LAPACK", "metis", 1, "not those of its rank 0.03 of full"),
    ("parts not split off", "smooth k", 1, "attention qk.fprop.k: declared mxint8"),
    ("parts not split off", "smooth k tiled", 1, "attention qk.fprop.k: declared mxint8"),
    ("parts left out", "hot channels", 1, "of channels along tokens of the error"),
    ("P normalised first", "row sums", 1, "attention exp(S - m): "),
    ("P multiplied", "row sums", 1, "pv.fprop.P: declared bf16"),
    ("sums of rounded exp", "row sums", 1, "or the sums of its rows"),
    ("rows not divided", "row sums", 1, "pv.fprop: 512 of 512 elements"),
    ("softmax of another map", "row sums", 1, "its product ran outside of a pass"),
    ("maximum not raised", "row sums all slots tiled", 1, "not those of its scores and m"),
    ("maximum always raised", "row sums", 1, "not those of its scores and m"),
    ("delta of P", "row sums", 1, "dS: "),
    (
        "delta of o in fp8",
        "row sums all slots tiled",
        2,
        "elements are not the softmax's derivative",
    ),
    ("gains unrounded", "norms", 2, "norm.fprop.w: declared mxfp8_e4m3"),
    ("gains shown alone", "norms", 2, "its norm used the parameter as it is"),
    ("gains in E5M2", "norms", 3, "norm.fprop.w: declared mxfp8_e4m3"),
    ("results of norms unrounded", "norms", 1, "norm.fprop.y: declared mxfp8_e4m3"),
    ("norm's gradient doubled", "norms", 1, "drawn elements of the gradient of"),
    ("master unrounded", "master", 1, "optimizer.master.w: declared fp8_e4m3, no step has rounded"),
    ("master in E5M2", "master", 1, "optimizer.master.w"),
    ("error not fed back", "master", 1, "of the first moment are not those with the error of"),
    ("error fed back negated", "master", 1, "of the first moment are not those with the error of"),
    ("never reset", "reset", 5, "weights are not as they must be reset"),
    ("all reset", "reset", 5, "weights are not as they must be reset"),
    ("paths not followed", "reset", 4, "numbers of what was observed of them are wrong"),
    ("not pulled", "pull", 1, "weights are not as they must be pulled"),
    ("pulled too far", "pull", 1, "weights are not as they must be pulled"),
    ("term left out", "smooth", 1, "elements of the gradient are wrong"),
    ("curvature of one step", "smooth", 2, "elements of the curvature are wrong"),
    ("Primus 932", "sr rht", 1, "linear."),
    ("gain's gradient halved from 2", "mxfp4", 2, "'s gain are not those of its module's passes"),
    ("gains without a gradient from 2", "mxfp4", 2, "'s gain did not come"),
    ("a matrix left out", "mxfp4", 1, "the optimizer holds 0 of its "),
    (
        "moments that are NaN from 2",
        "mxfp4",
        2,
        "of its first moment are not those of its gradient",
    ),
    ("gain's gradient halved", "norms", 1, "'s gain are not those of its module's passes"),
    ("gradients of vectors lost in micro-batch 1", "bf16", 1, "not added to the main gradient"),
    ("lr doubled from 3", "mxfp4", 3, "weights are not those of AdamW's step"),
    ("weight decay skipped", "bf16", 1, "weights are not those of AdamW's step"),
    ("norms decay", "mxfp4", 1, "norm.weight: "),
    ("another beta2", "mxfp4", 1, "of its second moment are not those of its gradient"),
    ("bias correction missing from 2", "bf16", 2, "weights are not those of AdamW's step"),
    ("moments in bf16 from 2", "mxfp4", 2, "of its first moment are not those of its gradient"),
    ("gradients in fp8 for the step", "mxfp4 fp16", 1, "of its first moment are not those"),
    ("a matrix frozen from 2", "mxfp4", 2, "weights are not those of AdamW's step"),
    ("not clipped", "mxfp4", 1, "of its first moment are not those of its gradient"),
    ("norm halved", "mxfp4", 1, "was taken for it"),
    ("model weights truncated", "mxfp4", 2, "weights of the model are not the main weights"),
    ("tokens for labels", "mxfp4", 1, "labels are not the next token"),
    (
        "gradient of the loss doubled",
        "mxfp4",
        1,
        "do not have their part in the mean of the losses",
    ),
    ("tokens without gradient from 2", "bf16", 2, "16 tokens do not have their part in the mean"),
    ("smaller loss written", "mxfp4", 1, "was written for it"),
    ("next loss in the line from 2", "mxfp4", 2, "loss in metrics.jsonl is"),
    ("smaller norm in the line from 2", "mxfp4", 2, "grad_norm in metrics.jsonl is"),
    ("other rate in the line from 2", "muon", 2, "lr in metrics.jsonl is"),
    ("other tokens in the line from 2", "bf16", 2, "tokens in metrics.jsonl is 128, and the iter"),
    ("taken step in the line from 2", "mxfp4 fp16", 2, "skipped in metrics.jsonl is True, and"),
    ("embedding's gradient halved from 2", "mxfp4", 2, "the embedding are not those of its"),
    ("embedding without gradient", "bf16", 1, "of the embedding did not come"),
    ("another epsilon of norms", "mxfp4", 1, "Megatron-Core's layernorm_epsilon is 0.001"),
    ("GELU in the place of SiLU", "bf16", 1, "Megatron-Core's activation_func is"),
    ("dropout of 0.1", "mxfp4", 1, "Megatron-Core's hidden_dropout is 0.1"),
    ("a window of 16 tokens", "bf16", 1, "Megatron-Core's window_size is (16, 0)"),
    ("output layer with the initial table", "bf16", 1, "model: "),
    ("last norm left out", "mxfp4", 1, "the last norm is no RMSNorm"),
    ("last micro-batch dropped", "mxfp4", 1, "has had 1 micro-batches, not 2"),
    ("attention to later tokens", "bf16", 1, "attention P: "),
    ("attention to later tokens", "all slots mxfp4 tiled", 1, "attention P: "),
    ("one held-out batch again and again", "validation", 1, "not those of the samples that are"),
    ("gradients halved before the step", "mxfp4", 1, "its main gradient has changed after the"),
    ("moments lost between steps", "bf16", 2, "moments are not what the last step left"),
    ("weights shrunk between steps", "mxfp4", 2, "are not what the last step left"),
    ("every other step left out", "bf16", 2, "its loss and gradient are finite"),
    ("every other step left out for a NaN", "bf16", 2, "left out for a norm of nan, and that of"),
    ("every other step left out for an overflow", "mxfp4 fp16", 2, "left out for a norm of inf"),
    ("matrices by AdamW", "muon", 1, "the optimizer has the moments of another rule"),
    ("fc2 by AdamW", "muon", 1, "fc2.weight: the optimizer has the moments of another rule"),
    ("torchtitan 1720", "bf16", 1, "initial weights are not those of the seed"),
    ("initial weights too wide", "mxfp4", 1, "initial weights are not those of the seed"),
]
#: The other settings, where a run takes longer or starts others.
SLOW: list[tuple[str, str, int, str]] = [
    ("of high", "of forward attention", 1, "qk.dgrad_k.q"),
    ("fused output of the original q", "mxfp8 fused", 1, "pv.fprop: it is the product of q"),
    ("fused gradients of the original k", "mxfp8 fused", 1, "dgrad_q: it is the product of"),
    ("fused gradients of originals from 2", "mxfp8 fused", 2, "dgrad_q: it is the product of"),
    ("fused backward times 0.9", "mxfp4 fused large scores", 1, "dgrad_q: "),
    ("not turned back", "tp2 sp quartet", 1, "linear.wgrad"),
    ("of high", "tp2 sp of forward drawn", 1, "linear.wgrad.x"),
    ("of another copy", "ep2 of forward drawn", 1, "linear.wgrad.x"),
    ("of high", "tp2 sp of stored", 1, "linear."),
    ("of another copy", "ep2 of stored", 1, "linear."),
    ("expert 0", "experts mxfp4", 1, "expert0"),
    ("rows of one sequence", "experts mxfp4", 1, "expert"),
    ("router hidden", "experts mxfp4", 1, "logits are not the product of what entered it"),
    ("experts of a neighbour", "experts mxfp4", 1, "are not given to the experts of its logits"),
    ("experts of a neighbour from 2", "experts mxfp4", 2, "not given to the experts of its logits"),
    ("weights of experts in fp8", "latent mxfp8", 1, "weights of experts are not those of its"),
    ("rows for experts rounded", "experts mxfp4", 1, "did not reach the experts chosen for them"),
    ("weights sent exchanged", "ep2 mxfp4", 1, "other weights than the router's"),
    ("experts added in part", "latent mxfp8", 1, "are not the sum of what each returned"),
    ("rows rolled", "experts mxfp4", 1, "of another sequence or micro-batch"),
    ("another rotary base", "latent mxfp8", 1, "rotary angles are not those of the configuration"),
    ("latent rotated back", "latent mxfp8", 1, "as q are not those of its projection, rotated"),
    ("embedding in fp8", "tp2 sp mxfp4", 1, "left the embedding are not the rows of their tokens"),
    ("loss smaller", "tp2 fp8", 1, "of the loss are not the cross entropy of the logits"),
    (
        "gradient of the loss in fp8",
        "tp2 sp mxfp4",
        1,
        "of the gradient of the logits are not the loss's",
    ),
    ("last norm in fp8", "pp2 interleaved mxfp8", 1, "that entered the output layer are not what"),
    ("rows for experts rounded", "ep2 mxfp8 all-to-all", 1, "did not reach the experts"),
    ("rows for experts exchanged", "tp2 experts fp8", 1, "have other weights than the router's"),
    ("experts added in part", "tp2 experts fp8", 1, "are not the sum of what each returned"),
    ("positions in the own part", "tp2 sp sr rht", 1, "linear."),
    ("angles one early", "cp2 mxfp4 tiled", 1, "rotary angles are not those of the configuration"),
    ("router quantised from iteration 2", "experts mxfp4", 2, "router: must be in high precision"),
    ("latent projections", "latent mxfp8", 1, "kv"),
    ("output layer's dw", "tied output mxfp8", 1, "output layer"),
    ("lookup reversed", "tied output mxfp8", 1, "lookup"),
    ("bias dropped", "bias mxfp8", 1, "qkv"),
    ("bias's gradient doubled", "bias mxfp8", 1, "linear_qkv's bias are not those of its"),
    ("gain's gradient halved", "tp2 sp mxfp4", 1, "'s gain are not those of its module's passes"),
    ("lr doubled from 3", "dp2 mxfp8", 3, "weights are not those of AdamW's step"),
    ("lr doubled from 3", "ep2 mxfp4", 3, "weights are not those of AdamW's step"),
    ("momentum not orthogonalised", "muon", 1, "along its momentum, orthogonalised"),
    ("four Newton-Schulz steps", "muon", 1, "along its momentum, orthogonalised"),
    ("fused matrices orthogonalised whole", "muon", 1, "along its momentum, orthogonalised"),
    ("Muon's updates 2% longer", "muon", 1, "along its momentum, orthogonalised"),
    ("router's input detached", "experts mxfp4", 1, "gradient of what entered it did not come"),
    (
        "router's input detached before it from 2",
        "latent mxfp8",
        2,
        "gradient of what entered it did not come",
    ),
    ("router's input detached", "tp2 experts fp8", 1, "gradient of what entered it did not come"),
    ("weights detached", "experts mxfp4", 1, "the gradient of its weights did not come"),
    ("weights detached behind the router", "ep2 mxfp4", 1, "gradient of its weights did not come"),
    ("gradient of weights halved", "latent mxfp8", 1, "do not follow from that of its weights"),
    (
        "gradient of logits in fp8 from 2",
        "experts fp8",
        2,
        "do not follow from that of its weights",
    ),
    ("gradient of the router's input halved", "experts mxfp4", 1, "not the product of its logits'"),
    ("balancing loss twice", "experts mxfp4", 1, "from that of its weights and the balancing loss"),
    ("balancing loss twice", "tp2 experts fp8", 1, "of its weights and the balancing loss"),
    ("another coefficient", "ep2 mxfp8 all-to-all", 1, "of its weights and the balancing loss"),
    ("another coefficient", "latent mxfp8", 1, "of its weights and the balancing loss"),
    ("no balancing loss from 2", "experts mxfp4", 2, "of its weights and the balancing loss"),
    (
        "balancing loss of all sequences",
        "experts mxfp4",
        1,
        "of its weights and the balancing loss",
    ),
    ("balancing loss's gradient doubled", "experts mxfp4", 1, "weights and the balancing loss"),
    ("smaller balancing loss", "experts mxfp4", 1, "the balancing loss of the routers is"),
    ("smaller balancing loss", "ep2 mxfp4", 1, "the balancing loss of the routers is"),
    ("smaller balancing loss", "tp2 experts fp8", 1, "the balancing loss of the routers is"),
    ("one expert a token", "experts mxfp4", 1, "Megatron-Core's moe_router_topk is 1"),
    ("z-loss", "latent mxfp8", 1, "Megatron-Core's moe_z_loss_coeff is 0.1"),
    ("attention to later tokens", "cp2 mxfp4 tiled", 1, "attention P: "),
    (
        "gradients halved before the step",
        "pp2 interleaved mxfp8",
        1,
        "has changed after the passes",
    ),
    ("every other step left out for a NaN", "dp2 mxfp8", 2, "left out for a norm of nan, and that"),
    ("every other step left out for a NaN", "tp2 experts fp8", 2, "left out for a norm of nan"),
    ("moments lost between steps", "dp2 mxfp8", 2, "moments are not what the last step left"),
    ("last micro-batch dropped", "dp2 mxfp8", 1, "micro-batches, not "),
    ("labels one later", "cp2 mxfp4 tiled", 1, "labels are not the next token"),
    ("gradient of the loss doubled", "pp2 interleaved mxfp8", 1, "part in the mean of the losses"),
    ("unquantised after going on", "resumed", 3, "layer"),
    ("moments lost", "resumed", 3, "exp_avg/decoder.layers.0"),
    ("second moments in bf16", "resumed", 3, "exp_avg_sq/decoder.layers.0"),
    ("weights restored in bf16", "resumed", 3, "main/decoder.layers.0"),
    ("first moments saved in bf16", "resumed", 3, "drawn elements of exp_avg/"),
    ("weights saved in bf16", "dp2 mxfp8", 3, "drawn elements of main/"),
    ("moments of rank 1 saved as zeros", "dp2 mxfp8", 3, "is not what rank 1 held: "),
    ("moments saved exchanged", "resumed", 3, "drawn elements of exp_avg_sq/"),
    ("a tensor that is not saved", "resumed", 3, "drawn elements of main/"),
    ("rows saved rolled", "resumed", 3, "drawn elements of main/"),
    ("smaller loss written", "tp2 sp mxfp4", 1, "was written for it"),
    ("smaller loss written", "cp2 mxfp4 tiled", 1, "was written for it"),
    ("smaller loss written", "pp2 interleaved mxfp8", 1, "was written for it"),
    ("smaller norm in the line from 2", "dp2 mxfp8", 2, "grad_norm in metrics.jsonl is"),
    ("smaller norm in the line from 2", "pp2 interleaved mxfp8", 2, "grad_norm in metrics.jsonl"),
    ("smaller balancing loss in the line from 2", "latent mxfp8", 2, "aux_loss in metrics.jsonl"),
    ("gradients not reduced from 2", "dp2 mxfp8", 2, "main gradient are not the sum of the ranks'"),
    ("gradients of rank 1 halved", "cp2 mxfp4 tiled", 1, "gradient are not the sum of the ranks'"),
    ("sums of gradients in bf16", "dp2 mxfp8", 1, "main gradient are not the sum of the ranks'"),
    ("gains not added over ranks", "tp2 sp mxfp4", 1, "layernorm.weight"),
    ("tied embedding not added over stages", "pp2 interleaved mxfp8", 1, "embedding"),
    ("activations sent in e5m2", "pp2 interleaved mxfp8", 1, "sent in micro-batch 0 is not what"),
    ("activations sent in e5m2 from 3", "pp2 interleaved mxfp8", 3, "is not what stage"),
    ("activations sent in e5m2 in evaluations", "pp2 validation mxfp8", 1, "is not what stage"),
    ("half gradient sent", "pp2 interleaved mxfp8", 1, "the gradient that stage"),
    ("embedding's gradient in fp8", "output fp8", 1, "the embedding are not those of its"),
    ("embedding's gradient halved from 2", "pp2 interleaved mxfp8", 2, "model"),
    ("embedding's gradient halved from 2", "tp2 fp8", 2, "the embedding are not those of its"),
    ("embedding's gradient in fp8", "mxfp4 fp16", 1, "the embedding are not those of its"),
    ("router's gradient negated", "experts mxfp4", 1, "the router's weight are not those of its"),
    ("router's gradient negated", "latent mxfp8", 1, "the router's weight are not those of its"),
    ("later sample unquantised", "evaluate", 2, "layer"),
    ("evaluation negated k", "gradient", 1, "qk.fprop.k"),
    ("clip ignored", "clipped", 1, "dgrad"),
    ("seed of another run", "python", 1, "linear."),
    ("noise", "mxfp4 fp16", 1, "layer 0"),
    ("numpy in linear.dgrad", "mxfp4 fp32", 1, "dgrad"),
    ("baseline in bf16", "bf16 fp32", 1, "layer 0"),
    ("rank 1", "dp2 mxfp8", 1, "rank 1"),
    ("amax of the own part", "tp2 fp8", 1, "rank"),
    ("rank 1 from iteration 3", "tp2 sp mxfp4", 3, "rank 1"),
    ("last stage's last layer", "pp2 interleaved mxfp8", 1, "layer 3"),
    ("experts of rank 1", "ep2 mxfp4", 1, "rank 1"),
    ("rank 1 attention", "cp2 mxfp4 tiled", 1, "rank 1"),
    ("parts left out", "tp2 sp averis", 1, "not those of its mean along tokens"),
    ("parts left out from 3", "tp2 sp averis", 3, "rank"),
    ("dk of the own queries", "cp2 all slots fp8", 1, "dgrad_k"),
    ("P multiplied", "cp2 row sums fp8", 1, "pv.fprop.P: declared fp8_e4m3"),
    ("maximum not raised", "cp2 row sums fp8", 1, "not those of its scores and m"),
    ("results of norms unrounded", "tp2 sp norms", 1, "norm.fprop.y: declared hifp8"),
    ("amax of the own part", "tp2 sp norms", 1, "norm.fprop.y: declared hifp8"),
    ("torchtitan 1720", "tp2 sp mxfp4", 1, "initial weights are not those of the seed"),
    ("rank 1 begins with other rows", "tp2 sp mxfp4", 1, "weights are not those of the seed"),
    ("initial weights too wide", "pp2 interleaved mxfp8", 1, "linear_proj.weight"),
    ("initial weights too wide", "tp2 experts fp8", 1, "linear_fc2.weight"),
]
_NUMBER = re.compile(r"iteration (\d+)")


@pytest.fixture(scope="module", autouse=True)
def _shared_cache(cache: Path) -> Iterator[None]:
    bench.CACHE[:] = [cache]
    yield
    bench.CACHE.clear()


def _case(case: tuple[str, str, int, str]) -> str:
    return f"{case[0]}, {case[1]}"


@pytest.mark.parametrize("case", DEFAULT, ids=_case)
def test_lie_ends_the_run_in_the_iteration_in_which_it_begins(
    case: tuple[str, str, int, str],
) -> None:
    _require_named(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=_case)
def test_lie_is_named_in_every_kind_of_run(case: tuple[str, str, int, str]) -> None:
    _require_named(*case)


def test_lie_in_one_product_is_named_when_its_turn_comes() -> None:
    run = trace("mxfp4", FAULTS["proj of layer 1 from iteration 3"], iterations=bench.LONG)
    assert run.is_caught, run.reason
    assert "layer 1 proj linear.wgrad" in run.reason
    found = _NUMBER.search(run.reason)
    assert found is not None
    assert 3 <= int(found[1]) < bench.LONG


def _require_named(fault: str, setting: str, iteration: int, words: str) -> None:
    run = trace(setting, FAULTS[fault])
    assert run.fired, "the fault was planted where nothing calls"
    assert run.error == "EngagementError", run.reason or f"it passed, with {run.numbers}"
    found = _NUMBER.search(run.reason)
    assert found is not None, run.reason
    assert int(found[1]) == iteration, run.reason
    assert words in run.reason
    # The optimizer took no step with what was not declared.
    assert len(run.numbers) == (0 if "resumed" in setting else iteration - 1) or (
        SETTINGS[setting].kind is not Kind.TRAIN or "validation" in setting or "saved" in fault
    )


@pytest.mark.parametrize("setting", ["mxfp4", "sr rht"])
def test_honest_run_is_not_accused_and_does_not_depend_on_its_proof(setting: str) -> None:
    proved, unproved = trace(setting, None), trace(setting, None, proved=False)
    assert not proved.error, proved.reason
    assert first_difference(proved, unproved) is None


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_honest_run_is_accused(setting: str) -> None:
    honest(setting)


@pytest.mark.exhaustive
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("group", Group, ids=lambda group: group.name.lower())
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_lie(setting: str, group: Group) -> None:
    """Faults without an effect on the numbers, and faults that end a run by another error, mislead nobody.

    What begins later, in a single product, may be named when its turn comes; what happened to others must not wait.
    """
    chosen = [fault for fault in FAULTS.values() if fault.group is group]
    outcomes = [outcome(name, fault) for name, fault in pairs(chosen, [setting])]
    allowed = () if group is Group.VENDOR else (Status.LATE,)
    wrong = [o for o in outcomes if o.status in {Status.PASSED, Status.LATE} - set(allowed)]
    assert [(o.fault, o.status.value, o.effect, o.caught) for o in wrong] == []
