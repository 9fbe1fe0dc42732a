"""What the training loop calls: forward and backward of a whole step, its norm, its routers.

Shapes: B this rank's rows of the step, S sequence, L MoE layers, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_moe.config.sections import RunConfig
from titan_moe.layers.head import IGNORED_LABEL
from titan_moe.layers.moe import MoE
from titan_moe.mesh import Meshes
from titan_moe.parallel.fsdp import fsdp_modules
from titan_moe.parallel.norm import clip_grads, grad_norm

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class StepOutput:
    """Of the whole step, the same on all ranks.

    loss: 0-d fp64, cross-entropy in nats per valid token, without any balance term.
    balance_loss: 0-d fp64, weighted balance and z losses summed over layers, mean over sequences.
    valid_tokens: positions with a label.
    """

    loss: Tensor
    balance_loss: Tensor
    valid_tokens: int


class Engine:
    """The sharded model of this rank, behind calls that know nothing of the layout.

    Batches are dicts of int64 [B, S]: tokens, labels (-100: none), positions and document_ids
    (-1: padding). All methods are collective: every rank calls them, in the same order.
    """

    def __init__(
        self, parts: list[nn.Module], config: RunConfig, meshes: Meshes, device: torch.device
    ) -> None:
        """parts: the model's pieces on this rank; without pipeline parallelism one, the whole."""
        assert len(parts) == 1
        self.parts = parts
        self._model: Any = parts[0]
        self._device = device
        self._rows = config.training.rows_per_micro_batch(meshes.dp_degree)
        self._validation_rows = config.validation.local_batch_size or self._rows
        self._loss_group = meshes.loss_group
        self._ranks_per_stage = meshes.layout.world // meshes.layout.pp
        self._moes = [module for module in self._model.modules() if isinstance(module, MoE)]

    def forward_backward(self, batch: Batch) -> StepOutput:
        """Add the gradients of one step to `.grad`. The batch is this rank's share of all its rows.

        The loss of each micro-batch is its sum over tokens divided by the valid tokens of the whole
        step, so gradients are summed over micro-batches and ranks, and averaged over neither.
        Afterwards the MoE layers hold this rank's token counts of the step, for `update_routers`.

        Raises:
            ValueError: rows that are no multiple of local_batch_size; a step without a valid token.
        """
        rows = len(batch["tokens"])
        if rows == 0 or rows % self._rows:
            raise ValueError(
                f"training.local_batch_size = {self._rows} does not divide the {rows} rows of a "
                f"rank's step"
            )
        valid_tokens, sequences = self._sum_over_ranks(
            (batch["labels"] != IGNORED_LABEL).sum(), torch.tensor(rows)
        )
        if valid_tokens == 0:
            raise ValueError("a step without a single valid token: its loss is not defined")
        for moe in self._moes:
            moe.counts.zero_()
            moe.balance_loss_sum.zero_()
            moe.aux_scale.fill_(1.0 / sequences)

        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        micro_batches = list(self._slices(batch, self._rows))
        for index, micro_batch in enumerate(micro_batches):
            self._all_reduce_replicas(index == len(micro_batches) - 1)
            nats = self._nats(micro_batch) / valid_tokens
            torch.autograd.backward(nats)
            loss += nats.detach()
        balance_loss = torch.zeros_like(loss)
        for moe in self._moes:
            balance_loss += moe.balance_loss_sum
        sums = torch.stack([loss, balance_loss / sequences])
        dist.all_reduce(sums, group=self._loss_group)
        return StepOutput(sums[0], sums[1], valid_tokens)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Nats and valid tokens of all ranks' batches, each summed, 0-d fp64.

        Every rank brings the same number of rows. Nothing of the training state moves: weights,
        counts and biases keep their bits, and the mode is put back.
        """
        training = self._model.training
        self._model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro_batch in self._slices(batch, self._validation_rows):
            sums[0] += self._nats(micro_batch)
            sums[1] += (micro_batch["labels"] != IGNORED_LABEL).sum()
        for module in fsdp_modules(self._model):
            # With weights kept after forward, no backward is coming that would let go of them.
            module.reshard()
        self._model.train(training)
        dist.all_reduce(sums, group=self._loss_group)
        return sums[0], sums[1]

    def grad_norm(self, p: float = 2.0) -> Tensor:
        """p-norm (2.0, or math.inf) of the whole model's gradient, 0-d fp64."""
        return grad_norm(self._model.parameters(), self._ranks_per_stage, self._device, p)

    def clip_grads(self, norm: Tensor, max_norm: float) -> None:
        """Multiply gradients by min(1, max_norm / (norm + 1e-6)), in place."""
        clip_grads(self._model.parameters(), norm, max_norm)

    @torch.no_grad()
    def update_routers(self) -> Tensor:
        """Move every selection bias by the step's counts: once per optimizer step, after it.

        Returns tokens per MoE layer and expert over all ranks, int64 [L, E]; without MoE layers
        [0, 0].
        """
        if not self._moes:
            return torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        counts_LE = torch.stack([moe.counts for moe in self._moes])
        dist.all_reduce(counts_LE, group=self._loss_group)
        for moe, counts_E in zip(self._moes, counts_LE, strict=True):
            moe.update_selection_bias(counts_E)
        return counts_LE

    def _slices(self, batch: Batch, rows: int) -> Iterator[Batch]:
        for begin in range(0, len(batch["tokens"]), rows):
            yield {
                key: value[begin : begin + rows].to(self._device, non_blocking=True)
                for key, value in batch.items()
            }

    def _nats(self, micro_batch: Batch) -> Tensor:
        """Cross-entropy summed over the labels of a micro-batch."""
        hidden_BSD = self._model(
            micro_batch["tokens"],
            positions_BS=micro_batch["positions"],
            document_ids_BS=micro_batch["document_ids"],
            tokens_BS=micro_batch["tokens"],
        )
        nats: Tensor = self._model.head.loss(hidden_BSD, micro_batch["labels"])
        return nats

    def _sum_over_ranks(self, *numbers: Tensor) -> list[int]:
        """One collective, and the step's one wait for the device."""
        sums = torch.stack([number.to(self._device) for number in numbers])
        dist.all_reduce(sums, group=self._loss_group)
        totals: list[int] = sums.tolist()
        return totals

    def _all_reduce_replicas(self, last: bool) -> None:
        """Gradients are reduced over HSDP's replicas, often the slower way, once per step.

        Over shards each micro-batch's are reduced at once, so that no rank keeps a whole gradient.
        """
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_all_reduce(last)
