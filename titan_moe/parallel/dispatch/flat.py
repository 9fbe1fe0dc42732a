"""Expert parallelism, flat: each (token, choice) goes straight to the rank that has its expert.

T tokens, D hidden, K experts chosen per token, N = T·K choices, R rows, P ranks, E experts of all
ranks, e experts of one rank.
"""

import torch
from torch import Tensor

from titan_moe.layers.router import ROUTING_OPS
from titan_moe.parallel.dispatch.host_reads import read_on_host
from titan_moe.parallel.dispatch.rows import Delivery, Sizes, count, deliver, give_back
from titan_moe.parallel.dispatch.wire import Wire


class FlatDispatcher:
    """One all-to-all of rows, and one back. Equal parts of the experts, in order of ranks.

    forced_balance: routing is round-robin, and all ranks have as many tokens as this one: sizes
        follow from shapes, and nothing is exchanged about them nor read on the host.
    """

    def __init__(self, wire: Wire, num_experts: int, *, forced_balance: bool) -> None:
        self.traffic = wire.traffic
        self._wire, self._num_experts, self._forced_balance = wire, num_experts, forced_balance

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Delivery]:
        sorted_ids_N, choice_N = expert_ids_TK.flatten().sort(stable=True)
        sizes = self._sizes(count(sorted_ids_N, self._num_experts), expert_ids_TK.numel())
        weights_N = weights_TK.flatten().index_select(0, choice_N)
        return deliver(self._wire, x_TD, choice_N // expert_ids_TK.shape[1], weights_N, sizes)

    def combine(self, weighted_rows_RD: Tensor, handle: Delivery) -> Tensor:
        return give_back(self._wire, weighted_rows_RD, handle)

    def _sizes(self, counts_E: Tensor, choices: int) -> Sizes:
        ranks, rank = self._wire.ranks, self._wire.rank
        if self._forced_balance:
            # What this rank asks of itself, all others ask of it too.
            splits = [sum(part) for part in split(round_robin(choices, self._num_experts), ranks)]
            return Sizes(
                splits, [splits[rank]] * ranks, counts_E.view(ranks, -1)[rank].expand(ranks, -1)
            )
        arriving_Pe, sizes = exchange_counts(counts_E, self._wire.handle)
        splits, arriving = sizes.tolist()
        return Sizes(splits, arriving, arriving_Pe)


def round_robin(choices: int, num_experts: int) -> list[int]:
    """How many of the first `choices` of 0, 1 ... E-1, 0, 1 ... each expert gets."""
    return [choices // num_experts + (e < choices % num_experts) for e in range(num_experts)]


def split(numbers: list[int], parts: int) -> list[list[int]]:
    """Equal parts, in order."""
    size = len(numbers) // parts
    return [numbers[part * size : (part + 1) * size] for part in range(parts)]


@torch.library.custom_op("titan_moe::exchange_counts", mutates_args=())
def exchange_counts(counts_E: Tensor, wire: int) -> tuple[Tensor, Tensor]:
    """This rank's choices per expert -> arriving_Pe, and on the host [2, P]: splits, arriving.

    An operator, so that recomputation finds the sizes kept: no second exchange, no second wait.
    """
    over = Wire.of(wire)
    counts_Pe = counts_E.view(over.ranks, -1)
    arriving_Pe = over.send_one(counts_Pe)
    return arriving_Pe, read_on_host(torch.stack([counts_Pe.sum(dim=1), arriving_Pe.sum(dim=1)]))


@exchange_counts.register_fake
def _(counts_E: Tensor, wire: int) -> tuple[Tensor, Tensor]:
    ranks = Wire.of(wire).ranks
    sizes = counts_E.new_empty(2, ranks, device="cpu")
    return counts_E.new_empty(ranks, len(counts_E) // ranks), sizes


ROUTING_OPS.add(torch.ops.titan_moe.exchange_counts.default)
