"""Both dispatchers against single visits: output, every gradient, and what the protocol promises.

T tokens of a rank, K experts chosen per token, e experts of a rank, R rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.layers.helpers import error
from tests.parallel.dispatching import (
    BACKENDS,
    Backend,
    E,
    Outcome,
    Visits,
    dispatcher,
    one_by_one,
    same_for_all,
    spread,
    visit,
)
from tests.tolerances import BF16_ROUNDED, FP32_REORDERED
from titan_moe.check.pool import Pool
from titan_moe.parallel.collectives import Map
from titan_moe.parallel.dispatch import rows, two_tier, wire

WORLD, DOMAIN = 4, 2

VISITS = {
    "uneven": Visits(spread([5, 1, 9, 2])),
    "ranks without tokens": Visits(spread([0, 7, 0, 3])),
    "one token in all": Visits(spread([0, 0, 1, 0])),
    "no token at all": Visits(spread([0, 0, 0, 0])),
    "one expert for all": Visits(same_for_all([3, 4, 0, 6], lambda t: [9, 9])),
    "one rank for all": Visits(same_for_all([3, 4, 2, 6], lambda t: [4 + t % 4, 4 + (t + 1) % 4])),
    "one domain for all": Visits(same_for_all([3, 4, 2, 6], lambda t: [8 + t % 4, 12 + t % 4])),
    "many choices": Visits(spread([4, 2, 3, 5], top_k=9), top_k=9),
    "one choice": Visits(spread([4, 2, 3, 5], top_k=1), top_k=1),
    "bf16": Visits(spread([5, 0, 9, 2], top_k=4), top_k=4, dtype=torch.bfloat16),
}
for tokens, top_k in ((6, 3), (8, 2), (1, 4), (0, 2)):
    VISITS[f"forced balance, {tokens} tokens"] = Visits(
        same_for_all([tokens] * WORLD, lambda t, k=top_k: [(t * k + j) % E for j in range(k)]),
        top_k=top_k,
        forced_balance=True,
    )

Control = Callable[[pytest.MonkeyPatch], None]


@dataclass
class Seen:
    """On one rank: two runs of the same visits, and what its experts were given."""

    first: Outcome
    second: Outcome
    rows: Tensor
    weights: Tensor
    offsets: Tensor


def all_visits(backend: Backend) -> dict[str, Seen]:
    return {name: see(backend, visits) for name, visits in VISITS.items()}


def see(backend: Backend, visits: Visits, control: Control | None = None) -> Seen:
    """With one dispatcher, as a layer of a model does."""
    with pytest.MonkeyPatch.context() as patch:
        if control:
            control(patch)
        over = dispatcher(backend, DOMAIN, forced_balance=visits.forced_balance)
        rank = dist.get_rank()
        x_TD, weights_TK, _ = visits.inputs(rank)
        rows_RD, weights_R, offsets_e, _ = over.dispatch(x_TD, visits.ids_of(rank), weights_TK)
        return Seen(visit(over, visits), visit(over, visits), rows_RD, weights_R, offsets_e)


@pytest.fixture(scope="module")
def seen(pool: Pool) -> dict[tuple[str, str], list[Seen]]:
    """For each backend and each of VISITS, by rank. Meeting costs more than all of the visits."""
    found = {}
    for backend in BACKENDS:
        of_ranks = pool.run(WORLD, all_visits, backend)
        found |= {(backend, name): [of_rank[name] for of_rank in of_ranks] for name in VISITS}
    return found


def assert_equal(outcomes: list[Outcome], visits: Visits) -> None:
    tolerance = FP32_REORDERED if visits.dtype == torch.float32 else BF16_ROUNDED
    for outcome, expected in zip(outcomes, one_by_one(visits), strict=True):
        assert outcome.x_grad.dtype == visits.dtype
        for tensor, reference in zip(outcome.tensors(), expected.tensors(), strict=True):
            assert tensor.shape == reference.shape
            assert error(tensor, reference) < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VISITS)
def test_equals_single_visits(seen: Any, backend: Backend, name: str) -> None:
    of_ranks = seen[backend, name]
    assert_equal([of_rank.first for of_rank in of_ranks], VISITS[name])
    for of_rank in of_ranks:
        pairs = zip(of_rank.first.tensors(), of_rank.second.tensors(), strict=True)
        assert all(torch.equal(tensor, again) for tensor, again in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VISITS)
def test_every_choice_arrives_once_at_its_expert(seen: Any, backend: Backend, name: str) -> None:
    visits, held = VISITS[name], E // WORLD
    wanted: list[list[tuple[float, ...]]] = [[] for _ in range(E)]
    for rank, ids in enumerate(visits.ids):
        x_TD, weights_TK, _ = visits.inputs(rank)
        for t, chosen in enumerate(ids):
            for k, expert in enumerate(chosen):
                wanted[expert].append((weights_TK[t, k].item(), *x_TD[t].tolist()))
    for rank, of_rank in enumerate(seen[backend, name]):
        assert of_rank.rows.dtype == visits.dtype
        assert (of_rank.weights.dtype, of_rank.offsets.dtype) == (torch.float32, torch.int32)
        assert len(of_rank.offsets) == held
        assert of_rank.offsets[-1] == len(of_rank.rows) == len(of_rank.weights)
        begin = 0
        for local, end in enumerate(of_rank.offsets.tolist()):
            came = [
                (weight.item(), *row.tolist())
                for weight, row in zip(
                    of_rank.weights[begin:end], of_rank.rows[begin:end], strict=True
                )
            ]
            assert sorted(came) == sorted(wanted[rank * held + local])
            begin = end


def double_gradients(patch: pytest.MonkeyPatch) -> None:
    right = wire.there_and_back

    def doubled(rows: Tensor, there: Map, back: Map) -> Tensor:
        return right(rows, there, lambda grad: back(2 * grad))

    patch.setattr(wire, "there_and_back", doubled)


def leave_by_rank(patch: pytest.MonkeyPatch) -> None:
    """Rows in the order in which they came."""

    def order(arriving_Pe: Tensor, rows: int) -> Tensor:
        return torch.arange(rows)

    patch.setattr(rows, "_by_expert", order)


def sum_once(patch: pytest.MonkeyPatch) -> None:
    """Of several rows of a token, one."""

    def last(x_CD: Tensor, token_C: Tensor, tokens: int) -> Tensor:
        return x_CD.new_zeros(tokens, x_CD.shape[1]).index_copy(0, token_C, x_CD).float()

    patch.setattr(rows, "_summed", last)


def swap_tiers(patch: pytest.MonkeyPatch) -> None:
    """Ranks that are far apart taken for a domain."""
    right = two_tier.tiers

    def swapped(group: Any, domain_ranks: int) -> Any:
        return right(group, domain_ranks)[::-1]

    patch.setattr("tests.parallel.dispatching.tiers", swapped)


CONTROLS: list[tuple[Backend, Control]] = [
    *((backend, double_gradients) for backend in BACKENDS),
    *((backend, sum_once) for backend in BACKENDS),
    *((backend, leave_by_rank) for backend in BACKENDS),
    ("two_tier", swap_tiers),
]


def all_controls() -> list[Outcome]:
    visits = VISITS["many choices"]
    return [see(backend, visits, control).first for backend, control in CONTROLS]


def test_broken_controls_are_seen(pool: Pool) -> None:
    for outcomes in zip(*pool.run(WORLD, all_controls), strict=True):
        with pytest.raises(AssertionError):
            assert_equal(list(outcomes), VISITS["many choices"])
