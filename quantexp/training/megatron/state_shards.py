"""What a rank holds of the training state: from Megatron's optimizers into a checkpoint, and back in any layout.

Each of Megatron's three optimizers keeps fp32 main weights, and Adam's moments of them:

    FP32Optimizer           the parameters themselves
    Float16Optimizer...     a copy of each 16-bit parameter
    DistributedOptimizer    a range of each flattened parameter, by data-parallel rank

Experts that ranks share have an optimizer of their own. Moments are put into Adam's state directly: Megatron's own
loading lets all parameters share one step tensor, which then counts once for each of them, and assumes that every
parameter has a state already. The main weights decide: the model's weights become their values in the working dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from quantexp.errors import DataError
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.checkpoints import STATE, STATE_INDEX
from quantexp.model.layout import Layout, Place
from quantexp.model.pieces import Piece
from quantexp.model.shards import expert_of, owners
from quantexp.model.training_state import (
    KEPT,
    MAIN,
    MOMENTS,
    MOMENTUM,
    VERSION,
    LossScale,
    SavedPieces,
    StateIndex,
    read_index,
)
from quantexp.proof.master_weights import AdamStep
from quantexp.schema import ModelConfig
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.finite import chained
from quantexp.training.megatron.parameters import Part, parts_of


@dataclass(frozen=True)
class Held:
    """The elements of a parameter whose main weights a rank has."""

    piece: Piece
    main: Tensor
    #: The Adam whose state has the moments; None if only the weights are saved.
    adam: Any = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The tensors of the optimizer's state."""
        return (MOMENTUM,) if hasattr(self.main, "muon") else MOMENTS

    @property
    def kept(self) -> dict[str, dict[str, Tensor]]:
        """What a scheme keeps of main weights besides, by product: tensors by kind."""
        if self.adam is None:
            return {}
        attributes: dict[str, Any] = vars(self.main)
        kept: dict[str, dict[str, Tensor]] = attributes.setdefault("kept", {})
        return kept

    @property
    def group(self) -> dict[str, Any]:
        """The options of the optimizer for these weights."""
        groups: list[dict[str, Any]] = self.adam.param_groups
        return next(g for g in groups if any(p is self.main for p in g["params"]))

    @property
    def steps(self) -> int:
        """Adam's steps; 0 before the first, and without an Adam."""
        state = None if self.adam is None else self.adam.state.get(self.main)
        if not state:
            return 0
        return int(state["step"] if "step" in state else self.adam.param_groups[0]["step"])

    @property
    def adam_step(self) -> AdamStep | None:
        """The numbers of Adam's last step; None of what Muon moves."""
        if self.kinds != MOMENTS:
            return None
        group = self.group
        beta1, beta2 = map(float, group["betas"])
        lr, eps, decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
        return AdamStep(lr, beta1, beta2, eps, decay, self.steps)

    def tensors(self) -> dict[str, Tensor]:
        """Main weights, moments and what else is kept by kind; no moments before the first step."""
        moments = self.kinds if self.steps else ()
        own = {MAIN: self.main.detach()} | {m: self.moment(m) for m in moments}
        for kept in self.kept.values():
            own |= kept
        return own

    def moment(self, kind: str) -> Tensor:
        """One of Adam's moments, after its first step."""
        moment: Tensor = self.adam.state[self.main][kind]
        return moment

    def set_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Replace Adam's state; torch's Adam counts in a tensor for each parameter, a fused one in its groups."""
        shape = self.main.shape
        state = {kind: x.view(shape).to(self.main.device) for kind, x in moments.items()}
        if isinstance(self.adam, torch.optim.Adam):
            state["step"] = torch.tensor(float(steps))
        else:
            for group in self.adam.param_groups:
                group["step"] = steps
        self.adam.state[self.main] = state


@dataclass(frozen=True)
class RankState:
    """A rank's contribution to a checkpoint."""

    #: By global name: what this rank writes.
    pieces: dict[str, Held]
    schedule_steps: int = 0
    optimizer_steps: int = 0
    loss_scale: LossScale | None = None
    #: By stream, as plain numbers.
    amax_histories: dict[str, Any] = field(default_factory=dict)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by their names in the file: `exp_avg/NAME`."""
        for name, held in self.pieces.items():
            for kind, tensor in held.tensors().items():
                yield f"{kind}/{name}", tensor


def weights_of(
    chunks: Sequence[GPTModel], model: ModelConfig, layout: Layout, rank: int
) -> RankState:
    """The weights alone, in the working dtype, of which a rank writes what no lower rank has."""
    parts = parts_of(chunks, model, layout, layout.place(rank))
    held = {}
    for name, part in parts.items():
        piece = Piece(part.parameter.shape, part.shard, 0, part.tensor.numel())
        held[name] = Held(piece, part.tensor)
    return RankState(written_pieces(held, model, layout, rank, distributed=False))


def index_of(state: RankState, iteration: int, layout: Layout, nonfinite: int) -> StateIndex:
    """What one rank knows of state.json: all but what is in the files and records of all."""
    return StateIndex(
        version=VERSION,
        iteration=iteration,
        layout=asdict(layout),
        schedule_steps=state.schedule_steps,
        optimizer_steps=state.optimizer_steps,
        loss_scale=state.loss_scale,
        amax_histories=state.amax_histories,
        files={},
        nonfinite=nonfinite,
    )


def held_pieces(optimizer: Any, parts: Mapping[str, Part]) -> dict[str, Held]:
    """What a rank holds, by global name.

    Args:
        optimizer: Megatron's optimizer of all parameters, or the chain of several.
        parts: the rank's parts of the parameters.
    """
    names = {id(part.tensor): name for name, part in parts.items()}
    held = {}
    for each in chained(optimizer):
        for parameter, main, start in _mains(each):
            name = names[id(parameter)]
            part = parts[name]
            piece = Piece(part.parameter.shape, part.shard, start, start + main.numel())
            held[name] = Held(piece, main, each.optimizer)
    return held


def _mains(optimizer: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Each parameter, its main weights, and their first element in the flattened parameter."""
    if optimizer.is_stub_optimizer:
        return
    if isinstance(optimizer, DistributedOptimizer):
        low, high = optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups
        yield from (
            (parameter, main, optimizer._get_model_param_range_map(parameter)["param"].start)
            for models, mains in (
                (optimizer.model_float16_groups, low),
                (optimizer.model_fp32_groups, high),
            )
            for parameter, main in _each(models, mains)
        )
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        whole = optimizer.fp32_from_fp32_groups
        pairs = _each(optimizer.float16_groups, optimizer.fp32_from_float16_groups)
        yield from ((parameter, main, 0) for parameter, main in (*pairs, *_each(whole, whole)))
    else:
        yield from ((parameter, parameter, 0) for parameter in optimizer.get_parameters())


def _each(models: Iterable[Any], mains: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    chain = itertools.chain.from_iterable
    return zip(chain(models), chain(mains), strict=True)


def written_pieces(
    held: Mapping[str, Held], model: ModelConfig, layout: Layout, rank: int, distributed: bool
) -> dict[str, Held]:
    """Those of a rank's pieces that it writes, so that all ranks together write every element once.

    Of ranks with the same part the lowest writes it. With a distributed optimizer, its data-parallel group does.
    """
    places, own = layout.model_places(), layout.place(rank)

    def writes(name: str, piece: Piece) -> bool:
        owner = owners(name, piece.shape, model, layout, places)[piece.shard]
        return rank == owner or (
            distributed and _group(name, own) == _group(name, layout.place(owner))
        )

    return {name: each for name, each in held.items() if writes(name, each.piece)}


def _group(name: str, place: Place) -> tuple[int, ...]:
    """What the ranks that divide a parameter's state among them have in common."""
    if expert_of(name) is None:
        return place.pipeline, place.tensor
    return place.pipeline, place.expert, place.expert_tensor


def loss_scale_of(optimizer: Any) -> LossScale | None:
    """The state of the dynamic loss scale; None without one."""
    scaler = getattr(chained(optimizer)[0], "grad_scaler", None)
    if scaler is None:
        return None
    state = scaler.state_dict()
    return LossScale(float(state["scale"]), state["growth_tracker"], state["hysteresis_tracker"])


@torch.no_grad()
def load_state(
    folder: Path,
    optimizer: Any,
    parts: Mapping[str, Part],
    models: Sequence[DistributedDataParallel],
) -> StateIndex:
    """Restore main weights, moments and loss scale, and the model's weights from the main ones; every rank calls this.

    Rates, weight decay and betas stay as configured.

    Args:
        folder: the checkpoint.
        optimizer: as in `held_pieces`, in any layout.
        parts: this rank's.
        models: the wrapped chunks, whose weights a distributed optimizer gathers.

    Raises:
        DataError: on all ranks: the state is missing, damaged or another model's on one of them.
    """
    index, words = None, None
    try:
        index = _load_own(folder, held_pieces(optimizer, parts))
    except DataError as error:
        words = str(error)
    if failures := [each for each in gather(words) if each is not None]:
        raise DataError(failures[0])
    assert index is not None
    _set_loss_scale(optimizer, index.loss_scale)
    publish_weights(optimizer, models)
    return index


def publish_weights(optimizer: Any, models: Sequence[DistributedDataParallel]) -> None:
    """Give the model the values of the main weights; every rank calls this."""
    for each in chained(optimizer):
        if hasattr(each, "_copy_main_params_to_model_params"):
            each._copy_main_params_to_model_params()
    if any(isinstance(each, DistributedOptimizer) for each in chained(optimizer)):
        for wrapped in models:
            wrapped.start_param_sync(force_sync=True)


def _load_own(folder: Path, held: Mapping[str, Held]) -> StateIndex:
    """Load what a rank holds; one piece is in memory besides it."""
    require_intact(folder, only=(f"{STATE}/{STATE_INDEX}",))
    index = read_index(folder / STATE / STATE_INDEX)
    targets = {name: each.piece for name, each in held.items()}
    saved = _open(folder, index, targets)
    for name, each in held.items():
        kinds = (MAIN, *each.kinds) if index.optimizer_steps else (MAIN,)
        values = saved.read(name, each.piece, kinds)
        each.main.copy_(values.pop(MAIN).view(each.main.shape))
        if values:
            each.set_moments(values, index.optimizer_steps)
        for product, kept in each.kept.items():
            if all(saved.has(name, kind) for kind in KEPT[product]):
                values = saved.read(name, each.piece, KEPT[product])
                kept.update({kind: x.to(each.main.device) for kind, x in values.items()})
    return index


def _open(folder: Path, index: StateIndex, targets: Mapping[str, Piece]) -> SavedPieces:
    """The pieces of the state that a rank reads, their files checked."""
    names = [f"{STATE}/{file}" for file in index.files]
    try:
        saved = SavedPieces.open(folder / STATE, index.files, targets)
    except DataError:
        require_intact(folder, only=names)  # its words name the checkpoint before it
        raise
    read = {f"{STATE}/{file.name}" for file in saved.files(targets)}
    require_intact(folder, only=read)
    return saved


def _set_loss_scale(optimizer: Any, saved: LossScale | None) -> None:
    for each in chained(optimizer):
        if saved is not None and getattr(each, "grad_scaler", None) is not None:
            state = vars(saved) | {"scale": torch.tensor([saved.scale])}
            each.grad_scaler.load_state_dict(state)
