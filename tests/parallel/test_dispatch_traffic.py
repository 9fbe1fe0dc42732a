"""Bytes that 8 ranks send inside fast domains and across them, against a count by hand.

T tokens of a rank, D hidden, K experts chosen per token, E experts.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tests.layers.helpers import error, fill
from tests.parallel.dispatching import (
    BACKENDS,
    Backend,
    D,
    E,
    Outcome,
    Visits,
    dispatcher,
    same_for_all,
    spread,
    visit,
)
from tests.tolerances import FP32_REORDERED
from titan_moe.check.pool import Pool
from titan_moe.config.model import Balance
from titan_moe.layers.experts import Experts
from titan_moe.layers.moe import MoE
from titan_moe.layers.router import Router
from titan_moe.parallel.expert import reset_traffic, traffic_of

WORLD, DOMAIN = 8, 4
HELD = E // WORLD  # experts of one rank
COUNT, FP32, INT32 = 8, 4, 4  # bytes of a number of rows, of a router weight, of an expert's number
TOKENS = [5, 0, 9, 2, 7, 1, 0, 12]

Bytes = tuple[int, int]  # inside, across


def chosen_within(limit: int, domain: int, top_k: int = 4) -> list[list[list[int]]]:
    """Routing limited to `limit` domains per token, as DeepSeek-V3's nodes; by its own router."""
    domains = WORLD // domain
    router = fill(
        Router(
            D, E, top_k, num_groups=domains, num_limited_groups=limit, score_function="sigmoid",
            normalize_weights=True, route_scale=1.0, std=1.0,
        )
    )  # fmt: skip
    x_TD = torch.randn(sum(TOKENS), D, generator=torch.Generator().manual_seed(5))
    nobody, counts = torch.zeros(len(x_TD), dtype=torch.bool), torch.zeros(E, dtype=torch.int64)
    scores_TE = router.scores(router(x_TD))
    ids = router.select(scores_TE, nobody, counts, round_robin=False).tolist()
    return [ids[sum(TOKENS[:rank]) :][: TOKENS[rank]] for rank in range(WORLD)]


VISITS = {
    "spread": Visits(spread(TOKENS, top_k=4), top_k=4),
    "bf16": Visits(spread(TOKENS, top_k=4), top_k=4, dtype=torch.bfloat16),
    "one expert for all": Visits(same_for_all(TOKENS, lambda t: [9, 9])),
    "forced balance": Visits(
        same_for_all([5] * WORLD, lambda t: [(3 * t + k) % E for k in range(3)]),
        top_k=3,
        forced_balance=True,
    ),
}


class ByHand:
    """What each rank sends, message by message."""

    def __init__(self, visits: Visits, domain: int) -> None:
        self.visits, self.domain = visits, domain
        self.bytes = [[0, 0] for _ in range(WORLD)]
        self.row = D * visits.dtype.itemsize

    def message(self, sender: int, receiver: int, size: int) -> None:
        if sender != receiver:
            self.bytes[sender][sender // self.domain != receiver // self.domain] += size

    def row_and_back(self, sender: int, receiver: int, metadata: int, weights: int) -> None:
        """A row of activations with its router weights, its result, and the gradients of both."""
        self.message(sender, receiver, self.row + metadata + weights)
        self.message(receiver, sender, self.row)
        self.message(sender, receiver, self.row)
        self.message(receiver, sender, self.row + weights)

    def flat(self) -> list[Bytes]:
        for sender, of_rank in enumerate(self.visits.ids):
            for chosen in of_rank:
                for expert in chosen:
                    self.row_and_back(sender, expert // HELD, 0, FP32)
            if not self.visits.forced_balance:
                for receiver in range(WORLD):
                    self.message(sender, receiver, HELD * COUNT)
        return [(inside, across) for inside, across in self.bytes]

    def two_tier(self) -> list[Bytes]:
        for sender, of_rank in enumerate(self.visits.ids):
            for chosen in of_rank:
                for place in {expert // HELD // self.domain for expert in chosen}:
                    between = place * self.domain + sender % self.domain
                    numbers = self.visits.top_k
                    self.row_and_back(sender, between, numbers * INT32, numbers * FP32)
                for expert in chosen:
                    owner = expert // HELD
                    between = owner // self.domain * self.domain + sender % self.domain
                    self.row_and_back(between, owner, 0, FP32)
            if not self.visits.forced_balance:
                for other in range(WORLD):
                    if other % self.domain == sender % self.domain:
                        self.message(sender, other, (1 + HELD * self.domain) * COUNT)
                    if other // self.domain == sender // self.domain:
                        self.message(sender, other, HELD * COUNT)
        return [(inside, across) for inside, across in self.bytes]


def measured(visits: Visits, domain: int) -> dict[Backend, tuple[Bytes, Outcome]]:
    found: dict[Backend, tuple[Bytes, Outcome]] = {}
    for backend in BACKENDS:
        over = dispatcher(backend, domain, forced_balance=visits.forced_balance)
        outcome = visit(over, visits)
        found[backend] = (over.traffic.inside, over.traffic.across), outcome
    return found


def all_measured() -> dict[str, dict[Backend, tuple[Bytes, Outcome]]]:
    return {name: measured(visits, DOMAIN) for name, visits in VISITS.items()}


@pytest.fixture(scope="module")
def of_ranks(pool: Pool) -> list[dict[str, dict[Backend, tuple[Bytes, Outcome]]]]:
    return pool.run(WORLD, all_measured)


@pytest.mark.parametrize("name", VISITS)
def test_bytes_are_those_counted_by_hand(of_ranks: Any, name: str) -> None:
    for backend in BACKENDS:
        by_hand = getattr(ByHand(VISITS[name], DOMAIN), backend)()
        assert [of_rank[name][backend][0] for of_rank in of_ranks] == by_hand


@pytest.mark.parametrize("name", ["spread", "one expert for all", "forced balance"])
def test_backends_agree(of_ranks: Any, name: str) -> None:
    for of_rank in of_ranks:
        flat, two_tier = (of_rank[name][backend][1] for backend in BACKENDS)
        for tensor, reference in zip(two_tier.tensors(), flat.tensors(), strict=True):
            assert error(tensor, reference) < FP32_REORDERED


@pytest.mark.parametrize(("domain", "limit"), [(4, 1), (2, 2)])
def test_limited_routing_bounds_what_crosses(pool: Pool, domain: int, limit: int) -> None:
    """Rows across domains: two tiers at most `limit` per token, flat one per choice."""
    visits = Visits(chosen_within(limit, domain), top_k=4)
    crossings, choices = 0, 0
    for rank, of_rank in enumerate(visits.ids):
        for chosen in of_rank:
            own = rank // domain
            places = [expert // HELD // domain for expert in chosen]
            assert len(set(places)) <= limit
            crossings += len(set(places) - {own})
            choices += sum(place != own for place in places)
    ranks = pool.run(WORLD, measured, visits, domain)
    row, numbers = 4 * D * FP32, 4  # there and back, twice
    of_row = {"flat": row + 2 * FP32, "two_tier": row + numbers * (INT32 + 2 * FP32)}
    others = WORLD // domain - 1
    sizes = {
        "flat": (WORLD - domain) * HELD * COUNT,
        "two_tier": others * (1 + HELD * domain) * COUNT,
    }
    rows = {
        backend: (sum(found[backend][0][1] for found in ranks) - WORLD * sizes[backend])
        / of_row[backend]
        for backend in BACKENDS
    }
    assert rows == {"flat": choices, "two_tier": crossings}
    assert rows["two_tier"] <= limit * sum(TOKENS) < rows["flat"]


def bytes_of_model() -> tuple[Bytes, Bytes, Bytes]:
    """Of two layers together, of one alone, and after counts were reset."""
    visits = VISITS["spread"]
    layers = [layer_with(dispatcher("flat", DOMAIN)) for _ in range(2)]
    local = layer_with(None)
    for layer in layers:
        visit(layer.dispatcher, visits)
    parts = [nn.Sequential(layers[0], local), nn.Sequential(layers[1])]
    both, one = traffic_of(parts), traffic_of(parts[1:])
    reset_traffic(parts)
    none = traffic_of(parts)
    return tuple((t.inside, t.across) for t in (both, one, none))  # type: ignore[return-value]


def layer_with(over: Any) -> MoE:
    router = Router(
        D, E, 2, score_function="sigmoid", normalize_weights=True, route_scale=1.0, std=0.1
    )
    moe = MoE(router, Experts(HELD, D, 8, std=0.1), None, balance=Balance())
    if over is not None:
        moe.dispatcher = over
    return moe


def test_bytes_of_a_model_are_those_of_its_layers(pool: Pool) -> None:
    by_hand = ByHand(VISITS["spread"], DOMAIN).flat()
    for (inside, across), (both, one, none) in zip(
        by_hand, pool.run(WORLD, bytes_of_model), strict=True
    ):
        assert both == (2 * inside, 2 * across)
        assert one == (inside, across)
        assert none == (0, 0)


def without_domains() -> Bytes:
    over = dispatcher("flat", None)
    visit(over, VISITS["spread"])
    return over.traffic.inside, over.traffic.across


def test_without_domains_all_ranks_are_one(pool: Pool) -> None:
    for (inside, across), counted in zip(
        ByHand(VISITS["spread"], DOMAIN).flat(), pool.run(WORLD, without_domains), strict=True
    ):
        assert counted == (inside + across, 0)
