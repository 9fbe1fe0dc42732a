"""Expert parallelism over fast domains: a token crosses to each domain once, and is spread there.

Rank l of a domain sends each token to rank l of every domain that has one of its experts. That rank
hands it on to the experts, sums what they give, and sends one row back, however many they were.
With routing limited to some nodes (DeepSeek-V3, arXiv 2412.19437, 2.1.2) a token crosses at most
that often.

T tokens, D hidden, K experts chosen per token, N domains, L ranks of a domain, C copies that go to
domains, M copies that arrive here, R rows, E experts of all ranks, X experts of one domain, e
experts of one rank.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.layers.router import ROUTING_OPS
from titan_moe.parallel.dispatch.flat import round_robin, split
from titan_moe.parallel.dispatch.host_reads import read_on_host
from titan_moe.parallel.dispatch.rows import (
    Delivery,
    Sizes,
    copy,
    count,
    deliver,
    give_back,
    sum_copies,
)
from titan_moe.parallel.dispatch.wire import Wire, exchange


@dataclass(frozen=True)
class TierSizes:
    """splits, arriving: copies that go to each domain, and that come from each. inside: see there.

    Known on the host all at once.
    """

    splits: list[int]
    arriving: list[int]
    inside: Sizes


@dataclass(frozen=True)
class Journey:
    """What `combine` needs to bring rows back over both tiers."""

    token_C: Tensor
    tokens: int
    sizes: TierSizes
    delivery: Delivery


class TwoTierDispatcher:
    """Rows go across domains, then inside; sums come back inside, then across.

    across: this rank and the ranks of the same place in other domains. inside: this rank's domain.
        Both count into one traffic.
    forced_balance: as in `FlatDispatcher`.
    """

    def __init__(
        self, across: Wire, inside: Wire, num_experts: int, *, forced_balance: bool
    ) -> None:
        assert across.traffic is inside.traffic
        self.traffic = across.traffic
        self._across, self._inside = across, inside
        self._num_experts, self._forced_balance = num_experts, forced_balance
        self._experts_of_domain = num_experts // across.ranks

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Journey]:
        tokens, top_k = expert_ids_TK.shape
        domains = self._across.ranks
        visits_TN = torch.zeros(tokens, domains, dtype=torch.bool, device=x_TD.device)
        visits_TN.scatter_(1, expert_ids_TK // self._experts_of_domain, True)
        sizes = self._sizes(visits_TN, expert_ids_TK)

        domains_N = torch.arange(domains, device=x_TD.device)
        key_TN = torch.where(visits_TN, domains_N, domains)  # what does not go is sorted last
        visit_C = key_TN.flatten().sort(stable=True).indices[: sum(sizes.splits)]
        token_C, domain_C = visit_C // domains, visit_C % domains
        ids_CK = self._within_domain(expert_ids_TK.index_select(0, token_C), domain_C)
        weights_CK = weights_TK.index_select(0, token_C)

        ids_MK = self._across.send(ids_CK, sizes.splits, sizes.arriving)
        weights_MK = exchange(self._across, weights_CK, sizes.splits, sizes.arriving)
        x_MD = exchange(self._across, copy(x_TD, token_C), sizes.splits, sizes.arriving)
        choice_C = ids_MK.flatten().sort(stable=True).indices[: sum(sizes.inside.splits)]
        rows_RD, row_weights_R, offsets_e, delivery = deliver(
            self._inside,
            x_MD,
            choice_C // top_k,
            weights_MK.flatten().index_select(0, choice_C),
            sizes.inside,
        )
        return rows_RD, row_weights_R, offsets_e, Journey(token_C, tokens, sizes, delivery)

    def combine(self, weighted_rows_RD: Tensor, handle: Journey) -> Tensor:
        sizes, delivery = handle.sizes, handle.delivery
        sums_MD = give_back(self._inside, weighted_rows_RD, delivery).to(delivery.dtype)
        sums_CD = exchange(self._across, sums_MD, sizes.arriving, sizes.splits)
        return sum_copies(sums_CD, handle.token_C, handle.tokens)

    def _within_domain(self, ids_CK: Tensor, domain_C: Tensor) -> Tensor:
        """int32, 0 ... X-1 for experts of the domain that a copy goes to, X for all others."""
        ids_CK = ids_CK - (domain_C * self._experts_of_domain)[:, None]
        elsewhere_CK = (ids_CK < 0) | (ids_CK >= self._experts_of_domain)
        return ids_CK.masked_fill(elsewhere_CK, self._experts_of_domain).to(torch.int32)

    def _sizes(self, visits_TN: Tensor, expert_ids_TK: Tensor) -> TierSizes:
        across, inside = self._across, self._inside
        counts_E = count(expert_ids_TK.flatten().sort().values, self._num_experts)
        if self._forced_balance:
            return self._forced_sizes(counts_E, *expert_ids_TK.shape)
        arriving_Le, sizes = exchange_tier_counts(
            counts_E, visits_TN.sum(dim=0), across.handle, inside.handle
        )
        lengths = [across.ranks] * 2 + [inside.ranks] * 2
        known = [part.tolist() for part in sizes.split(lengths)]
        return TierSizes(known[0], known[1], Sizes(known[2], known[3], arriving_Le))

    def _forced_sizes(self, counts_E: Tensor, tokens: int, top_k: int) -> TierSizes:
        """What this rank asks of any other, all others ask of it too."""
        domains, ranks = self._across.ranks, self._inside.ranks
        domain, rank = self._across.rank, self._inside.rank
        splits = round_robin_visits(tokens, top_k, self._num_experts, domains)
        counts_X = split(round_robin(tokens * top_k, self._num_experts), domains)[domain]
        inside_splits = [domains * sum(part) for part in split(counts_X, ranks)]
        arriving_e = counts_E.view(domains, ranks, -1)[domain, rank] * domains
        inside = Sizes(inside_splits, [inside_splits[rank]] * ranks, arriving_e.expand(ranks, -1))
        return TierSizes(splits, [splits[domain]] * domains, inside)


_tiers: WeakKeyDictionary[ProcessGroup, tuple[ProcessGroup, ProcessGroup]] = WeakKeyDictionary()


def tiers(group: ProcessGroup, domain_ranks: int) -> tuple[ProcessGroup, ProcessGroup]:
    """The groups across and inside domains of neighbouring ranks. Collective over `group`.

    Made once: all layers, and all parts of a model, send over the same.
    """
    if group not in _tiers:
        members = dist.get_process_group_ranks(group)
        domain, place = divmod(dist.get_rank(group), domain_ranks)
        begin = domain * domain_ranks
        inside, across = members[begin : begin + domain_ranks], members[place::domain_ranks]
        _tiers[group] = (
            dist.new_group(across, use_local_synchronization=True),
            dist.new_group(inside, use_local_synchronization=True),
        )
    return _tiers[group]


@cache
def round_robin_visits(tokens: int, top_k: int, num_experts: int, domains: int) -> list[int]:
    """How many tokens go to each domain if choice k of token t is expert (t·K + k) mod E."""
    size = num_experts // domains
    visits = Counter(
        domain
        for token in range(tokens)
        for domain in {(token * top_k + k) % num_experts // size for k in range(top_k)}
    )
    return [visits[domain] for domain in range(domains)]


@torch.library.custom_op("titan_moe::exchange_tier_counts", mutates_args=())
def exchange_tier_counts(
    counts_E: Tensor, visits_N: Tensor, across: int, inside: int
) -> tuple[Tensor, Tensor]:
    """-> arriving_Le, and on the host all of `TierSizes` [2N + 2L], in its order.

    counts_E: this rank's choices per expert. visits_N: its copies per domain. The ranks in between
    learn how many choices come with the copies, and pass the sum on, before anybody waits.
    """
    outer, inner = Wire.of(across), Wire.of(inside)
    told_NX = torch.cat([visits_N[:, None], counts_E.view(outer.ranks, -1)], dim=1)
    heard_NX = outer.send_one(told_NX)
    choices_Le = heard_NX[:, 1:].sum(dim=0).view(inner.ranks, -1)
    arriving_Le = inner.send_one(choices_Le)
    sizes = [visits_N, heard_NX[:, 0], choices_Le.sum(dim=1), arriving_Le.sum(dim=1)]
    return arriving_Le, read_on_host(torch.cat(sizes))


@exchange_tier_counts.register_fake
def _(counts_E: Tensor, visits_N: Tensor, across: int, inside: int) -> tuple[Tensor, Tensor]:
    domains, ranks = Wire.of(across).ranks, Wire.of(inside).ranks
    sizes = counts_E.new_empty(2 * (domains + ranks), device="cpu")
    return counts_E.new_empty(ranks, len(counts_E) // (domains * ranks)), sizes


ROUTING_OPS.add(torch.ops.titan_moe.exchange_tier_counts.default)
