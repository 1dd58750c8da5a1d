"""The configuration, typed: every key a YAML file or the command line may set, its type and its default.

Hydra composes into these dataclasses and `load` reads them back, so a misspelt key or a value of the wrong type
cannot pass. They hold data only; ranges and combinations are checked in `validate`, where a message can
name the full key. They stay unfrozen because OmegaConf cannot build nested frozen dataclasses. Choices are Enums whose
member names are what the user types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from quantexp.schema_data import DatasetConfig as DatasetConfig
from quantexp.schema_data import TokenizerKind as TokenizerKind


class Precision(Enum):
    """The working precision of activations and weights."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class LrSchedule(Enum):
    """How the learning rate falls after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    #: Warm-up, stable, decay: constant until the last `training.decay_iterations`, then linear to min_lr.
    wsd = "wsd"


class AttentionPath(Enum):
    """How attention is computed."""

    #: Product by product: scores and probabilities are held whole.
    plain = "plain"
    #: By torch's fused kernel, where the scheme leaves P and the gradients in high precision.
    fused = "fused"
    #: Product by product as plain, of a tile of queries at a time: scores and probabilities are never held whole.
    tiled = "tiled"


class Recompute(Enum):
    """Which activations are recomputed in the backward pass instead of stored."""

    none = "none"
    full = "full"


class CaptureLevel(Enum):
    """What is kept of a captured tensor."""

    off = "off"
    stats = "stats"
    tensors = "tensors"


class CaptureValues(Enum):
    """Which values of a product's operands are kept: before they are quantised, after it, or both."""

    before = "before"
    after = "after"
    both = "both"


class StoreKind(Enum):
    """What captured values are kept in."""

    pt = "pt"
    safetensors = "safetensors"


class AutoDraw(Enum):
    """What is drawn after a run."""

    everything = "true"
    quick = "quick"
    nothing = "false"


class WandbMode(Enum):
    """Where Weights & Biases keeps a run."""

    online = "online"
    offline = "offline"


class SampleOf(Enum):
    """What a sample of a captured tensor is made of."""

    rows = "rows"
    blocks = "blocks"
    heads = "heads"


class AuxLoss(Enum):
    """Over which tokens the load of a router's experts is balanced."""

    none = "none"
    #: Those of the micro-batch.
    batch = "batch"
    #: Those of each sequence by itself.
    sequence = "sequence"


@dataclass
class YarnConfig:
    """YaRN's scaling of rotary frequencies (arXiv 2309.00071) as DeepSeek-V2 has it; names as in its config.json.

    With m(x) = 0.1 x ln(factor) + 1, cosine and sine are multiplied by m(mscale) / m(mscale_all_dim) and the softmax
    scale by m(mscale_all_dim)^2.
    """

    #: How many times longer sequences may be.
    factor: float = MISSING
    #: Longest sequence before, tokens.
    original_length: int = MISSING
    #: Rotations over the original length from which a frequency stays as it is.
    beta_fast: float = 32.0
    #: Rotations below which it is divided by the factor.
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass
class MlaConfig:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1); names as in Megatron's MLATransformerConfig."""

    #: Width of the queries' latent; null projects queries directly.
    q_lora_rank: int | None = None
    #: Width of the latent that keys and values share.
    kv_lora_rank: int = MISSING
    #: Elements of a query or key head without position.
    qk_head_dim: int = MISSING
    #: Elements of a query or key head with rotary position; the keys' are shared by all heads.
    qk_pos_emb_head_dim: int = MISSING
    #: Elements of a value head.
    v_head_dim: int = MISSING
    #: null is plain rotary embedding.
    yarn: YarnConfig | None = None


@dataclass
class MoeConfig:
    """A mixture of experts in place of the feed-forward (arXiv 2405.04434, section 2.2)."""

    #: Routed experts of a layer.
    num_experts: int = MISSING
    #: Routed experts that a token goes to.
    top_k: int = MISSING
    #: Inner width of one expert, elements.
    expert_ffn_hidden_size: int = MISSING
    #: Experts that every token goes to; they are one feed-forward of so many times the width.
    num_shared_experts: int = 0
    #: The first layers, which have the plain feed-forward of `ffn_hidden_size`.
    num_dense_layers: int = 0
    #: Whether the weights of a token's experts are made to add up to 1.
    norm_topk_prob: bool = False
    #: What the weights are multiplied with; not together with norm_topk_prob.
    routed_scaling_factor: float = 1.0
    aux_loss: AuxLoss = AuxLoss.none
    #: Factor of the balancing loss.
    aux_loss_coefficient: float = 0.0


@dataclass
class ModelConfig:
    """A decoder-only transformer of the Llama or DeepSeek-V2 family; every number as published."""

    #: The choice's name; part of the run folder's name.
    name: str = MISSING
    #: Decoder layers.
    num_layers: int = MISSING
    #: Width of the residual stream, elements.
    hidden_size: int = MISSING
    #: Inner width of the gated feed-forward, elements; with `moe` of the dense layers' alone.
    ffn_hidden_size: int = MISSING
    #: Query heads.
    num_attention_heads: int = MISSING
    #: Key and value heads (grouped-query attention); with `mla` as many as query heads.
    num_query_groups: int = MISSING
    #: Elements of one query or key head; with `mla` the sum of its two parts.
    head_dim: int = MISSING
    #: Rows of the embedding that the tokenizer can name; Megatron's padding is counted apart.
    vocab_size: int = MISSING
    #: Longest sequence the model was published for, tokens.
    max_sequence_length: int = MISSING
    #: Added to the mean square in RMSNorm.
    norm_epsilon: float = 1.0e-5
    #: Base period of the rotary embedding.
    rotary_base: int = 10000
    #: Llama 3's frequency scaling; null is none.
    rope_scaling_factor: float | None = None
    #: Whether the output layer is the embedding.
    tie_embeddings: bool = False
    #: Standard deviation of the initial weights.
    init_std: float = 0.02
    #: Multi-head latent attention; null is grouped-query attention.
    mla: MlaConfig | None = None
    #: A mixture of experts; null is a feed-forward in every layer.
    moe: MoeConfig | None = None
    #: A published config.json, or the folder of one: all numbers above are its, unless they are given beside.
    from_hf: str | None = None
    #: Published weights to start with, a folder of safetensors; null is random weights of the seed.
    init_from: str | None = None


@dataclass
class Slot:
    """One operand of one matrix product. What is null is the site's (or the format's own)."""

    #: A format of `quantexp list`, `bf16` (the working precision) or `reuse` (the forward copy).
    format: str | None = None
    #: Elements that share a scale (MX formats, nvfp4), a power of two.
    block: int | None = None
    #: floor, rceil, ceil or even (MX formats).
    scale_rule: str | None = None
    #: even, away or stochastic.
    rounding: str | None = None
    #: none, current, exact or delayed (hifp8, fp8, nvfp4: one scale a tensor).
    scaling: str | None = None
    #: Iterations whose amax counts under delayed scaling.
    window: int | None = None
    #: Whether values beyond the largest become it instead of infinite, or NaN (hifp8, fp8).
    saturate: bool | None = None
    #: Whether 3/4 of the operand is rounded, and the product multiplied with 4/3 (mxfp4, nvfp4).
    pre_scale: bool | None = None
    #: Whether the derivative of quantising is 0, not 1, where an operand of the forward product saturated.
    clip_gradient: bool | None = None
    #: none, deterministic or random: a transform along the reduced axis, alike for both operands of a product.
    hadamard: str | None = None
    #: Elements of one transform, a power of two; the last may be short.
    hadamard_block: int | None = None


@dataclass
class LinearFprop:
    """y = x w^T."""

    x: Slot = field(default_factory=Slot)
    w: Slot = field(default_factory=Slot)


@dataclass
class LinearDgrad:
    """dx = g w."""

    g: Slot = field(default_factory=Slot)
    w: Slot = field(default_factory=Slot)


@dataclass
class LinearWgrad:
    """dw = g^T x."""

    g: Slot = field(default_factory=Slot)
    x: Slot = field(default_factory=Slot)


@dataclass
class LinearSite(Slot):
    """The decoder's linear layers; the keys of the site itself are the default of its six slots."""

    fprop: LinearFprop = field(default_factory=LinearFprop)
    dgrad: LinearDgrad = field(default_factory=LinearDgrad)
    wgrad: LinearWgrad = field(default_factory=LinearWgrad)


@dataclass
class QkFprop:
    """S = q k^T."""

    q: Slot = field(default_factory=Slot)
    k: Slot = field(default_factory=Slot)


@dataclass
class QkDgradQ:
    """dq = dS k."""

    dS: Slot = field(default_factory=Slot)
    k: Slot = field(default_factory=Slot)


@dataclass
class QkDgradK:
    """dk = dS^T q."""

    dS: Slot = field(default_factory=Slot)
    q: Slot = field(default_factory=Slot)


@dataclass
class QkSite(Slot):
    """The attention score product."""

    fprop: QkFprop = field(default_factory=QkFprop)
    dgrad_q: QkDgradQ = field(default_factory=QkDgradQ)
    dgrad_k: QkDgradK = field(default_factory=QkDgradK)


@dataclass
class PvFprop:
    """o = P v."""

    P: Slot = field(default_factory=Slot)
    v: Slot = field(default_factory=Slot)


@dataclass
class PvDgradP:
    """dP = dO v^T."""

    dO: Slot = field(default_factory=Slot)
    v: Slot = field(default_factory=Slot)


@dataclass
class PvDgradV:
    """dv = P^T dO."""

    P: Slot = field(default_factory=Slot)
    dO: Slot = field(default_factory=Slot)


@dataclass
class PvSite(Slot):
    """The product of attention probabilities and values."""

    fprop: PvFprop = field(default_factory=PvFprop)
    dgrad_p: PvDgradP = field(default_factory=PvDgradP)
    dgrad_v: PvDgradV = field(default_factory=PvDgradV)


@dataclass
class Rule(Slot):
    """Changes slots where it applies; of several rules the later wins. An empty list means all."""

    #: Layers, from 0; negative from the end.
    layers: list[int] = field(default_factory=list)
    #: Shell patterns on the module (qkv, proj, fc1, fc2, attention, kv-*, expert*).
    modules: list[str] = field(default_factory=list)
    #: linear, qk, pv.
    sites: list[str] = field(default_factory=list)
    #: fprop, dgrad, wgrad, dgrad_q, dgrad_k, dgrad_p, dgrad_v.
    products: list[str] = field(default_factory=list)
    #: x, w, g, q, k, dS, P, v, dO.
    operands: list[str] = field(default_factory=list)
    #: [first, last]: iterations from 1, both included; last null is to the end.
    iterations: list[int | None] = field(default_factory=list)


@dataclass
class QuantConfig:
    """A scheme: the three sites, then the rules."""

    #: Derived from the sites unless given; a shipped name on another composition is refused.
    name: str | None = None
    linear: LinearSite = field(default_factory=LinearSite)
    qk: QkSite = field(default_factory=QkSite)
    pv: PvSite = field(default_factory=PvSite)
    rules: list[Rule] = field(default_factory=list)


@dataclass
class CaptureRule:
    """Changes what is kept of the tensors it names; of several rules the later wins. An empty list means all."""

    #: Layers, from 0; negative from the end.
    layers: list[int] = field(default_factory=list)
    #: Shell patterns on the module (qkv, proj, fc1, fc2, attention, residual, router, expert*).
    modules: list[str] = field(default_factory=list)
    #: forward, backward.
    operations: list[str] = field(default_factory=list)
    #: Shell patterns on the tensor (input, weight, grad_*, ...); a quantised operand has the name of the tensor it is
    #: made from, and its own (input_fprop, *_wgrad, ...).
    tensors: list[str] = field(default_factory=list)
    #: off leaves them out, stats keeps their statistics, tensors their values too.
    level: CaptureLevel | None = None
    values: CaptureValues | None = None
    sample_count: int | None = None
    sample_of: SampleOf | None = None


@dataclass
class CaptureConfig:
    """What is kept of the tensors that pass the sites."""

    name: str = "stats"
    level: CaptureLevel = CaptureLevel.stats
    #: Iterations, and ranges of them with first and last included: [1, 100, 200-210].
    iterations: list[str] = field(default_factory=list)
    #: Every so many iterations: N, 2N, 3N, ...
    every: int | None = None
    #: Iterations 1, 2, 4, 8, ...
    powers_of_two: bool = False
    #: No iteration before this one, from 1.
    first_iteration: int = 1
    #: How many to capture, of those that the keys above name or from there on; 0 is all, null one without those keys
    #: and all with them.
    control_iter: int | None = None
    #: How many micro-batches of each captured iteration; 0 is all.
    collect_micro_batches: int = 1
    #: End the run, as completed, once everything asked for is on disk.
    stop_after_capture: bool = False
    #: before: tensors as they come. after: operands as each product multiplies them, with their scales, in the place of
    #: tensors that no product multiplies as they come. both: all of them.
    values: CaptureValues = CaptureValues.before
    #: Ordered rules on what is kept of which tensor.
    rules: list[CaptureRule] = field(default_factory=list)
    #: Keep at most so many rows, blocks or heads of each tensor's values, the same ones every time; 0 is all.
    sample_count: int = 0
    sample_of: SampleOf = SampleOf.rows
    #: A format that the statistics judge each tensor by (mxfp8, mxfp4, hifp8, ...), whatever the scheme; null is none.
    format: str | None = None
    #: The values of a run may take so much, in units of 1e9 bytes; null is what the disk has.
    max_gb: float | None = None
    #: Train on, without further captures, once captured tensors cannot be written any more (full disk).
    train_on_if_full: bool = False
    #: A `.pt` file for each tensor, or large safetensors shards, which are faster to write.
    store: StoreKind = StoreKind.pt
    #: Host memory for tensors that wait to be written, in units of 1e9 bytes; training waits while it is full.
    queue_gb: float = 1.0
    #: The attention probabilities, their gradient and that of the scores: they grow with the sequence squared.
    attn_weights: bool = False
    #: This rank's weight gradient of the micro-batch, and main_grad after the reduction.
    weight_grads: bool = False
    #: The residual stream after the embedding and after each layer's attention and MLP, and its gradients.
    residual: bool = False
    #: What each router scores the experts with, before softmax, and its gradients (models with experts).
    router_logits: bool = False
    #: Elsewhere than in the run folder; the run's own folder is made below it.
    dir: str | None = None


@dataclass
class TrainingConfig:
    """The loop: sizes, optimizer, precision, seed."""

    name: str = "default"
    #: Tokens of one sequence.
    seq_length: int = 4096
    #: Sequences a forward pass takes.
    micro_batch_size: int = 1
    #: Sequences of one optimizer step, over all micro-batches and data-parallel ranks.
    global_batch_size: int = 1
    #: Optimizer steps.
    iterations: int = 1000
    #: Largest learning rate.
    lr: float = 3.0e-4
    #: Learning rate at the end of the schedule.
    min_lr: float = 3.0e-5
    #: Steps in which the learning rate rises linearly from zero.
    warmup_iterations: int = 0
    lr_schedule: LrSchedule = LrSchedule.cosine
    #: wsd only: iterations of the decay at the end.
    decay_iterations: int | None = None
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1.0e-8
    #: Largest norm of the gradient; 0 is no clipping.
    clip_grad: float = 1.0
    precision: Precision = Precision.bf16
    #: fp16's first loss scale (a power of two); it adapts from there.
    initial_loss_scale: float = 65536.0
    recompute: Recompute = Recompute.none
    #: plain holds T x T scores for each head and takes every scheme; fused does not and takes FA_* and linear_*; tiled
    #: does not either and takes all but P or dS rounded stochastically.
    attention: AttentionPath = AttentionPath.plain
    #: Linear weights are quantised once a step for all micro-batches, and the copies kept; false: for each product.
    weight_cache: bool = True
    #: RUN@ITERATION: go on from that checkpoint of another run, at its place in the data.
    start_from: str | None = None
    #: And with the optimizer's state that the run kept (its checkpoint.optimizer=true).
    start_optimizer: bool = False
    seed: int = 1234
    #: Bit-equal repeats. null: on a CPU yes, on a GPU no.
    deterministic: bool | None = None
    #: Iterations in a row whose loss or gradient is not finite before the run stops.
    max_nonfinite_iterations: int = 3


@dataclass
class EvaluationConfig:
    """The loss of held-out samples while training; it changes nothing about the training."""

    #: After every so many iterations, and after the last; null is never.
    every: int | None = None
    #: How many samples of the validation split, the same ones every time.
    samples: int = 128


@dataclass
class CheckpointConfig:
    """When a run saves its model: as models are published, below the run folder's checkpoints/."""

    #: After every so many iterations; null is none on the way.
    every: int | None = None
    #: After the last iteration, which `quantexp export` takes.
    at_end: bool = False
    #: Keep the optimizer's state beside it, about six times the weights in bf16, for training.start_optimizer.
    optimizer: bool = False


@dataclass
class AnalysisConfig:
    """What is drawn after a run."""

    #: quick: figures/quick_analysis.png and report.html; true: the whole tree of `quantexp draw`, as PNG, too;
    #: false: nothing.
    auto: str = "quick"

    @property
    def drawing(self) -> AutoDraw:
        """What `auto` says; it is a word for OmegaConf, since an enumeration takes no `true`.

        Raises:
            ValueError: anything else.
        """
        return AutoDraw(self.auto.lower())


@dataclass
class WandbConfig:
    """Weights & Biases. There is no key for an API key: it comes from `wandb login` or WANDB_API_KEY."""

    #: Needs the extra quantexp[wandb].
    enabled: bool = False
    project: str = "quantexp"
    #: User or team; null is the account's own default.
    entity: str | None = None
    #: Runs that belong together on W&B's pages.
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    #: null is what WANDB_MODE says, else online.
    mode: WandbMode | None = None


@dataclass
class MlflowConfig:
    """MLflow. There are no keys for a user or password: they come from MLflow's own environment variables."""

    #: Needs the extra quantexp[mlflow].
    enabled: bool = False
    #: Server or database; null is what MLFLOW_TRACKING_URI says, else mlflow.db beside the run folders.
    tracking_uri: str | None = None
    #: MLflow's experiment, which is made if it does not exist.
    experiment: str = "quantexp"


@dataclass
class TrackingConfig:
    """Who is told about a run while it works, beside its own folder."""

    #: Event files in the run folder's tensorboard/.
    tensorboard: bool = True
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)


class LauncherKind(Enum):
    """Who starts the processes of a run."""

    local = "local"
    slurm = "slurm"


class ContainerRuntime(Enum):
    """What starts a container in a SLURM job."""

    apptainer = "apptainer"
    singularity = "singularity"
    pyxis = "pyxis"


@dataclass
class SlurmConfig:
    """What a SLURM job asks for; the cluster's own default where a value is null."""

    partition: str | None = None
    #: The account that is charged.
    account: str | None = None
    qos: str | None = None
    #: Time limit, minutes.
    time_min: int = 60
    #: Nodes of one run; its processes are spread over them evenly.
    nodes: int = 1
    #: GPUs of each node, one for each process there; 0 trains on CPU cores.
    gpus_per_node: int = 0
    #: SLURM's name for the kind of GPU (gres type).
    gpu_type: str | None = None
    #: CPU cores of each process.
    cpus_per_process: int | None = None
    #: Memory of each node, in units of 1e9 bytes.
    mem_gb: float | None = None
    #: Features that nodes must have.
    constraint: str | None = None
    #: Nodes not to use.
    exclude: str | None = None
    #: Nodes to use.
    nodelist: str | None = None
    reservation: str | None = None
    mail_user: str | None = None
    #: When SLURM writes a mail: END, FAIL, ...
    mail_type: str | None = None
    #: Modules to load before the run.
    modules: list[str] = field(default_factory=list)
    #: Shell lines that the job's script runs first, as they are.
    setup: list[str] = field(default_factory=list)
    #: Variables of the job's environment. Not for secrets: they stand in the script.
    environment: dict[str, str] = field(default_factory=dict)
    #: Image in which the run's processes start.
    container: str | None = None
    container_runtime: ContainerRuntime = ContainerRuntime.apptainer
    #: host:container[:options]; the run folders and quantexp's source are mounted anyway.
    container_mounts: list[str] = field(default_factory=list)
    #: Python on the nodes, or in the container; null is the one that submits.
    python: str | None = None
    #: Any other option of sbatch: its long name without dashes, and its value (true for a flag).
    sbatch: dict[str, str] = field(default_factory=dict)
    #: More arguments of srun.
    srun_args: list[str] = field(default_factory=list)
    #: How often the scheduler may start a run again (preemption, requeue, a lost node) before it has failed.
    max_requeue: int = 3
    #: Seconds before the time limit at which a run is warned.
    signal_s: int = 90
    #: One torchrun on each node instead of one task for each process.
    torchrun: bool = False


@dataclass
class LauncherConfig(SlurmConfig):
    """Where runs are started, and with what."""

    #: The choice's name.
    name: str = "local"
    #: local: processes of this machine. slurm: jobs; the keys of SlurmConfig are for it alone.
    kind: LauncherKind = LauncherKind.local
    #: Processes of one run, each with a share of every global batch (data parallel).
    num_processes: int = 1
    #: Minutes that a process waits for another one before the run has failed.
    timeout_min: float = 10.0
    #: CPU threads of one process; null leaves it to torch.
    num_threads: int | None = None
    #: Runs of a sweep at the same time; null is one here, and as many as the cluster gives under SLURM.
    max_parallel: int | None = None
    #: Return at once; the runs go on in the background (SLURM does so anyway).
    detach: bool = False


@dataclass
class PathsConfig:
    """Where runs are written."""

    #: Folder of the run folders, below the working directory unless absolute.
    root: str = "runs"
    #: Prepared samples and index caches; null is the user's cache folder.
    cache: str | None = None


@dataclass
class Experiment:
    """One run, whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    #: Show what would run and run nothing.
    dry_run: bool = False
    #: Run again although a completed run of this identity exists; the earlier attempt is kept.
    force: bool = False


@dataclass
class SweepConfig:
    """How the words of a sweep (`-m`) become points; without `-m` all of it stays null.

    Patterns are mappings of a key (`quant`, `training.lr`) to a shell pattern; all keys of a mapping must match, and of
    several mappings one. The shapes are checked in `quantexp.sweep.request`.
    """

    #: Swept keys that advance together instead of being multiplied: a list of keys, or several such lists.
    zip: Any = None
    #: A YAML file with explicit points: a list of mappings, override -> value.
    points: str | None = None
    #: Patterns of points to leave out.
    exclude: Any = None
    #: How many seeds, from training.seed on, or a list of seeds.
    seeds: Any = None
    #: Patterns of the points that run before all others.
    first: Any = None


@dataclass
class Composition(Experiment):
    """What is composed: an experiment, and how a sweep spreads it. A run's config.yaml holds no `sweep`."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
