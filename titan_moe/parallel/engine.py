"""What the training loop calls: forward and backward of a whole step, its norm, its routers.

Shapes: B this rank's rows of the step, S sequence, L MoE layers, E experts, M layers of multi-token
prediction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_moe.config.sections import RunConfig
from titan_moe.layers.head import IGNORED_LABEL, LossesAhead
from titan_moe.layers.moe import MoE
from titan_moe.mesh import Meshes
from titan_moe.parallel.ahead import labels_at_each_depth, look_ahead
from titan_moe.parallel.context import SequenceSlices
from titan_moe.parallel.expert import reset_traffic, traffic_of
from titan_moe.parallel.fsdp import fsdp_modules
from titan_moe.parallel.norm import clip_grads, grad_norm
from titan_moe.parallel.pending import PendingSums
from titan_moe.parallel.whole import Batch
from titan_moe.world import gather


@dataclass(frozen=True)
class StepOutput:
    """Of the whole step, the same on all ranks.

    loss: 0-d fp64, cross-entropy in nats per valid token, without any balance term or token ahead.
    balance_loss: 0-d fp64, weighted balance and z losses summed over layers, mean over sequences.
    valid_tokens: positions with a label.
    mtp_loss: 0-d fp64, of multi-token prediction: nats per token that a layer is to predict, mean
        over the layers that have any (nan: none has); None without such layers.
    """

    loss: Tensor
    balance_loss: Tensor
    valid_tokens: int
    mtp_loss: Tensor | None = None


class Runner(Protocol):
    """Takes some rows through this rank's parts of the model, be they all or a pipeline's."""

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        """Add the gradients of `scale` times the rows' summed cross-entropy to `.grad`.

        Returns that number for the labels that this rank has logits for, 0-d fp64; 0 if none.
        """
        ...

    def evaluate(self, batch: Batch, rows: int) -> Tensor:
        """Summed cross-entropy in nats, `rows` at a time, 0-d fp64; 0 without the head."""
        ...


class Engine:
    """The sharded model of this rank, behind calls that know nothing of the layout.

    Batches are dicts of int64 [B, S]: tokens, labels (-100: none), positions and document_ids
    (-1: padding): the whole rows of this rank's share of a step, the same on all ranks that share
    in computing them. All methods are collective: every rank calls them, in the same order.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        runner: Runner,
        config: RunConfig,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        """parts: the model's pieces on this rank, in order; without a pipeline one, the whole."""
        self.parts = parts
        self._runner = runner
        self._device = device
        self._meshes = meshes
        self._rows = config.training.rows_per_pass(meshes.dp_degree)
        self._validation_rows = config.validation.local_batch_size or self._rows
        self._has_domains = config.parallelism.scale_up_size is not None
        self._slices = SequenceSlices.of(meshes, config.parallelism)
        self._pending = PendingSums.of(parts, meshes)
        # All ranks of a tp group have the same loss: one of them speaks for it.
        self._has_loss = meshes.dense.get_local_rank("tp") == 0
        self._moes = {
            name: module
            for part in parts
            for name, module in part.named_modules()
            if isinstance(module, MoE)
        }
        self._num_experts = config.model.num_experts
        self._mtp_depth, self._mtp_weight = config.model.mtp_depth(), config.model.mtp_weight()
        self._ahead = [m for part in parts for m in part.modules() if isinstance(m, LossesAhead)]
        names = {name for of_rank in gather(list(self._moes)) for name in of_rank}
        self._layers = {name: index for index, name in enumerate(sorted(names, key=_natural))}

    def forward_backward(self, batch: Batch) -> StepOutput:
        """Put the gradients of one step into `.grad`. The batch is this rank's rows of the step.

        The loss of each micro-batch is its sum over tokens divided by the valid tokens of the whole
        step, so gradients are summed over micro-batches and ranks, and averaged over neither.
        Afterwards the MoE layers hold this rank's token counts of the step, for `update_routers`.

        Raises:
            ValueError: rows that are no multiple of local_batch_size; a step without a valid token.
        """
        assert all(p.grad is None for p in self.parameters()), "an earlier step's gradients"
        rows = len(batch["tokens"])
        if rows == 0 or rows % self._rows:
            raise ValueError(
                f"training.local_batch_size = {self._rows} does not divide the {rows} rows of a "
                f"rank's step"
            )
        batch = look_ahead(batch, self._mtp_depth)
        of_main, *of_ahead = labels_at_each_depth(batch["labels"]).unbind()
        valid_tokens, sequences, *valid_ahead = self._sum_over_rows(
            of_main, torch.tensor(rows), *of_ahead
        )
        if valid_tokens == 0:
            raise ValueError("a step without a single valid token: its loss is not defined")
        reset_traffic(self.parts)
        for moe in self._moes.values():
            moe.counts.zero_()
            moe.balance_loss_sum.zero_()
            moe.aux_scale.fill_(1.0 / sequences)
        self._expect_ahead(valid_ahead)

        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        passes = list(self._passes(batch, self._rows))
        for index, rows_of_pass in enumerate(passes):
            self._all_reduce_replicas(index == len(passes) - 1)
            loss += self._runner.forward_backward(rows_of_pass, 1.0 / valid_tokens)
        self._pending.add_up()
        balance_loss = torch.zeros_like(loss)
        for moe in self._moes.values():
            balance_loss += moe.balance_loss_sum
        sums = torch.stack([loss * self._has_loss, balance_loss / sequences, *self._nats_ahead()])
        dist.all_reduce(sums)
        return StepOutput(sums[0], sums[1], valid_tokens, _mean_ahead(sums[2:], valid_ahead))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Nats and valid tokens of all ranks' batches, each summed, 0-d fp64.

        Every rank brings the same number of rows. Nothing of the training state moves: weights,
        counts and biases keep their bits, and the mode is put back.
        """
        training = [part.training for part in self.parts]
        for part in self.parts:
            part.eval()
        nats = torch.zeros((), dtype=torch.float64, device=self._device)
        for whole in self._passes(batch, len(batch["tokens"])):
            nats += self._runner.evaluate(whole, self._validation_rows)
        for part, mode in zip(self.parts, training, strict=True):
            for module in fsdp_modules(part):
                # With weights kept after forward, no backward is coming that would let go of them.
                module.reshard()
            part.train(mode)
        sums = nats * self._has_loss
        dist.all_reduce(sums)
        (valid_tokens,) = self._sum_over_rows((batch["labels"] != IGNORED_LABEL).sum())
        return sums, torch.tensor(float(valid_tokens), dtype=torch.float64)

    def grad_norm(self, p: float = 2.0) -> Tensor:
        """p-norm (2.0, or math.inf) of the whole model's gradient, 0-d fp64."""
        copies = self._pending.copies
        return grad_norm(
            self.parameters(), self._meshes.layout.stage_ranks, self._device, p, copies
        )

    def clip_grads(self, norm: Tensor, max_norm: float) -> None:
        """Multiply gradients by min(1, max_norm / (norm + 1e-6)), in place."""
        clip_grads(self.parameters(), norm, max_norm)

    @torch.no_grad()
    def update_routers(self) -> Tensor:
        """Move every selection bias by the step's counts: once per optimizer step, after it.

        Returns tokens per MoE layer and expert over all ranks, int64 [L, E]; without MoE layers
        [0, 0].
        """
        own = {name: moe.counts for name, moe in self._moes.items()}
        counts_LE = self._over_layers(own, torch.int64)
        for name, moe in self._moes.items():
            moe.update_selection_bias(counts_LE[self._layers[name]])
        return counts_LE

    def selection_biases(self) -> Tensor:
        """The selection biases of the whole model's routers, fp32 [L, E] in order of layers."""
        own = {name: moe.router.selection_bias for name, moe in self._moes.items()}
        return self._over_layers(own, torch.float32, self._meshes.pipeline.get_group())

    def dispatch_bytes(self) -> dict[str, int | None] | None:
        """What dispatchers sent since the last step began, over all ranks: total, inside, across.

        inside: to ranks of the sender's fast domain, across: to all others; None without
        `scale_up_size`. None at all if nothing is sent, or a dispatcher does not count.
        """
        own = traffic_of(self.parts)
        if self._meshes.layout.ep == 1 or not all(gather(own is not None)):
            return None
        assert own is not None
        sums = torch.tensor([own.inside, own.across], device=self._device)
        dist.all_reduce(sums)
        inside, across = sums.tolist()
        if self._has_domains:
            return {"total": inside + across, "inside": inside, "across": across}
        return {"total": inside + across, "inside": None, "across": None}

    def num_parameters(self) -> int:
        """Of the whole model."""
        own = {name: p.numel() for part in self.parts for name, p in part.named_parameters()}
        of_all = {name: size for of_rank in gather(own) for name, size in of_rank.items()}
        return sum(of_all.values())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of all parts on this rank."""
        for part in self.parts:
            yield from part.parameters()

    def _expect_ahead(self, valid_M: list[int]) -> None:
        """Before a step: of multi-token prediction, its labels at each depth over all ranks.

        L = weight / M · sum over m of nats_m / valid_m (arXiv 2412.19437, equation 25); a depth
        without labels, as all documents are too short for it, has no nats either.
        """
        factor = self._mtp_weight / max(len(valid_M), 1)
        for ahead in self._ahead:
            ahead.nats_M.zero_()
            scales = [factor / max(valid, 1) for valid in valid_M]
            ahead.scale_M.copy_(torch.tensor(scales, device=self._device))

    def _nats_ahead(self) -> Iterator[Tensor]:
        """This rank's nats at each depth, 0-d fp64; 0 where the head is not."""
        nats_M = torch.zeros(self._mtp_depth, dtype=torch.float64, device=self._device)
        for ahead in self._ahead:
            nats_M += ahead.nats_M * self._has_loss
        yield from nats_M.unbind()

    def _passes(self, batch: Batch, rows: int) -> Iterator[Batch]:
        """This rank's tokens of so many rows at a time."""
        for begin in range(0, len(batch["tokens"]), rows):
            yield self._slices.of_batch(
                {
                    key: value[begin : begin + rows].to(self._device, non_blocking=True)
                    for key, value in batch.items()
                }
            )

    def _over_layers(
        self, own: dict[str, Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """[L, E], the sum over `group` (the world); a layer that is not on a rank adds nothing."""
        if not self._layers:
            return torch.zeros(0, 0, dtype=dtype, device=self._device)
        total_LE = torch.zeros(
            len(self._layers), self._num_experts, dtype=dtype, device=self._device
        )
        for name, values_E in own.items():
            total_LE[self._layers[name]] = values_E
        dist.all_reduce(total_LE, group=group)
        return total_LE

    def _sum_over_rows(self, *numbers: Tensor) -> list[int]:
        """Over all rows of a step. One collective, and the step's one wait for the device."""
        sums = torch.stack([number.to(self._device) for number in numbers])
        dist.all_reduce(sums)
        # Each row is on all ranks that share in computing it.
        ranks_per_row = self._meshes.layout.world // self._meshes.dp_degree
        return [int(total) // ranks_per_row for total in sums.tolist()]

    def _all_reduce_replicas(self, last: bool) -> None:
        """Gradients are reduced over HSDP's replicas, often the slower way, once per step.

        Over shards each micro-batch's are reduced at once, so that no rank keeps a whole gradient.
        """
        for part in self.parts:
            assert isinstance(part, FSDPModule)
            part.set_requires_all_reduce(last)


def _mean_ahead(nats_M: Tensor, valid_M: list[int]) -> Tensor | None:
    """Nats per token, mean over depths that have any; nan if none has."""
    if not valid_M:
        return None
    means = [nats / valid for nats, valid in zip(nats_M, valid_M, strict=True) if valid]
    return torch.stack(means).mean() if means else nats_M.new_tensor(float("nan"))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key by which layers.2 is before layers.10."""
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in name.split(".")]
