"""Context parallelism: each rank has some tokens of every row, and gathers keys and values.

A row is cut into 2·cp chunks, and rank r has chunks r and 2·cp-1-r, one early and one late: under a
causal mask every rank then scores as many pairs as any other (head-tail, as in striped variants of
ring attention, arXiv 2311.09431). Whoever reads keys sees them in the row's own order.

B batch, S tokens of this rank, T tokens of the whole row.
"""

import logging
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.config.sections import Parallelism
from titan_moe.config.words import counted
from titan_moe.layers.mask import AttentionMask, plain_causal
from titan_moe.mesh import Meshes
from titan_moe.parallel.collectives import gather_slices, sum_slices, there_and_back
from titan_moe.recipe import Sharding

logger = logging.getLogger(__name__)

LoadBalancer = Literal["headtail", "none"]


def row_order(tokens: int, ranks: int, balancer: LoadBalancer) -> Tensor:
    """[ranks, tokens / ranks]: the places in the row of each rank's tokens."""
    chunks = 2 * ranks if balancer == "headtail" else ranks
    assert tokens % chunks == 0, f"a row of {tokens} tokens in {chunks} chunks"
    places_CT = torch.arange(tokens).view(chunks, -1)
    if balancer == "none":
        return places_CT
    return torch.cat([places_CT[:ranks], places_CT[ranks:].flip(0)], dim=1)


@dataclass(frozen=True)
class RowOrder:
    """places_RS: the places in the row of each rank's tokens. inverse_T: from place to rank's."""

    places_RS: Tensor
    inverse_T: Tensor


@dataclass(frozen=True)
class SequenceSlices:
    """Which tokens of a row this rank of a cp group has."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    balancer: LoadBalancer
    # By length and device, so that no layer copies it to the device again.
    _orders: dict[tuple[int, torch.device], RowOrder] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, meshes: Meshes, section: Parallelism) -> "SequenceSlices":
        mesh = meshes.dense["cp"]
        return cls(
            mesh.get_group(),
            mesh.get_local_rank(),
            mesh.size(),
            section.context_parallel_load_balancer,
        )

    def of_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tokens of every row of a batch, [B, T] -> [B, S]."""
        if self.ranks == 1:
            return batch
        tokens = batch["tokens"].shape[1]
        places_S = self.order(tokens, batch["tokens"].device).places_RS[self.rank]
        return {key: value.index_select(1, places_S) for key, value in batch.items()}

    def order(self, tokens: int, device: torch.device) -> RowOrder:
        """Of rows of so many tokens."""
        if (tokens, device) not in self._orders:
            places_RS = row_order(tokens, self.ranks, self.balancer)
            inverse_T = places_RS.flatten().argsort()
            self._orders[tokens, device] = RowOrder(places_RS.to(device), inverse_T.to(device))
        return self._orders[tokens, device]

    def gather(self, x_BS: Tensor) -> Tensor:
        """Differentiable: [B, S, ...] -> [B, T, ...] in the row's order; gradients are summed."""
        order = self.order(x_BS.shape[1] * self.ranks, x_BS.device)

        def there(x_BS: Tensor) -> Tensor:
            return gather_slices(x_BS, 1, self.group).index_select(1, order.inverse_T)

        def back(grad_BT: Tensor) -> Tensor:
            by_rank_BT = grad_BT.index_select(1, order.places_RS.flatten())
            return sum_slices(by_rank_BT, 1, self.group)

        return there_and_back(x_BS, there, back)


@dataclass(frozen=True)
class GatherKeys:
    """An attention's `gather_kv`: its two tensors over the whole row."""

    slices: SequenceSlices

    def __call__(self, keys_BS: Tensor, values_BS: Tensor) -> tuple[Tensor, Tensor]:
        return self.slices.gather(keys_BS), self.slices.gather(values_BS)


@dataclass(frozen=True)
class SliceMask:
    """A model's `make_mask`: this rank's queries against the keys of the whole row."""

    slices: SequenceSlices
    documents: bool

    def __call__(self, document_ids_BS: Tensor) -> AttentionMask:
        slices = self.slices
        tokens = document_ids_BS.shape[1] * slices.ranks
        order_T = torch.arange(tokens, device=document_ids_BS.device)
        order_S = slices.order(tokens, document_ids_BS.device).places_RS[slices.rank]
        if not self.documents:
            document_ids_BS = torch.zeros_like(document_ids_BS)
            documents_BT = document_ids_BS.new_zeros(len(document_ids_BS), tokens)
        else:
            documents_BT = slices.gather(document_ids_BS)
        return AttentionMask(order_S, order_T, document_ids_BS, documents_BT)


def apply_context_parallel(
    model: nn.Module, meshes: Meshes, sharding: Sharding, section: Parallelism
) -> None:
    """Let every attention of `model` read the whole row, in place. `sharding` has no part in it.

    Raises:
        ValueError: a model without a `make_mask` slot, or whose attentions have no `gather_kv`.
    """
    slices = SequenceSlices.of(meshes, section)
    if not hasattr(model, "make_mask"):
        raise ValueError("context parallel: the model has no make_mask slot")
    setattr(model, "make_mask", SliceMask(slices, model.make_mask is not plain_causal))  # noqa: B010
    attentions = [module for module in model.modules() if hasattr(module, "gather_kv")]
    if not attentions:
        raise ValueError("context parallel: no module of the model has a gather_kv slot")
    for attention in attentions:
        setattr(attention, "gather_kv", GatherKeys(slices))  # noqa: B010
    logger.info(
        "context parallel: %s over %d ranks", counted(len(attentions), "attention"), slices.ranks
    )
