"""Who waits for the device, and how often: once per dispatch, never where shapes tell the sizes.

T tokens, D hidden, E experts of all ranks, e of one rank.
"""

import ast
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tests.parallel.dispatching import (
    BACKENDS,
    Backend,
    D,
    E,
    Visits,
    dispatcher,
    experts,
    local_matrices,
    same_for_all,
    spread,
    visit,
)
from titan_moe.check.pool import Pool
from titan_moe.config.model import Balance
from titan_moe.layers.experts import Experts
from titan_moe.layers.moe import MoE
from titan_moe.layers.router import ROUTING_OPS, Router
from titan_moe.parallel import dispatch as room
from titan_moe.parallel.dispatch import flat, two_tier
from titan_moe.parallel.dispatch.host_reads import read_on_host
from titan_moe.parallel.dispatch.wire import Wire
from titan_moe.passes.recompute import _keep_routing

WORLD, DOMAIN = 4, 2
WAITS = {"cpu", "item", "numpy", "nonzero", "argwhere", "masked_select", "unique", "bincount"}


def reads_and_exchanges(backend: Backend, visits: Visits, recomputed: bool) -> tuple[int, int]:
    """Host reads, and exchanges of sizes, of one forward and backward."""
    over = dispatcher(backend, DOMAIN, forced_balance=visits.forced_balance)
    send_one, exchanges = Wire.send_one, 0

    def counting(wire: Wire, x: Tensor) -> Tensor:
        nonlocal exchanges
        exchanges += 1
        return send_one(wire, x)

    before = read_on_host.count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "send_one", counting)
        if not recomputed:
            visit(over, visits)
        else:
            through_checkpoint(over, visits)
    return read_on_host.count - before, exchanges


def through_checkpoint(over: Any, visits: Visits) -> None:
    x_TD, weights_TK, grad_TD = visits.inputs(dist.get_rank())
    matrices_eDD, runs = local_matrices(), 0

    def layer(x_TD: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        rows_RD, weights_R, offsets_e, handle = over.dispatch(
            x_TD, visits.ids_of(dist.get_rank()), weights_TK
        )
        weighted_RD = experts(rows_RD, offsets_e, matrices_eDD) * weights_R[:, None]
        return over.combine(weighted_RD, handle).exp()

    out_TD = checkpoint(layer, x_TD.requires_grad_(), use_reentrant=False, context_fn=_keep_routing)
    out_TD.backward(grad_TD)
    assert runs == 2


CASES = {
    "plain": (Visits(spread([5, 0, 9, 2])), False),
    "recomputed": (Visits(spread([5, 0, 9, 2])), True),
    "no token": (Visits(spread([0, 0, 0, 0])), False),
    "forced balance": (
        Visits(same_for_all([4] * WORLD, lambda t: [2 * t, 2 * t + 1]), forced_balance=True),
        False,
    ),
}


def all_counts(backend: Backend) -> dict[str, tuple[int, int]]:
    return {name: reads_and_exchanges(backend, *case) for name, case in CASES.items()}


@pytest.mark.parametrize(("backend", "exchanges"), [("flat", 1), ("two_tier", 2)])
def test_one_read_per_dispatch(pool: Pool, backend: Backend, exchanges: int) -> None:
    for counts in pool.run(WORLD, all_counts, backend):
        forced = counts.pop("forced balance")
        assert set(counts.values()) == {(1, exchanges)}
        assert forced == (0, 0)


def without_replay(backend: Backend) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_moe.passes.recompute.ROUTING_OPS", ())
        return reads_and_exchanges(backend, *CASES["recomputed"])


def test_without_replay_recomputation_reads_again(pool: Pool) -> None:
    """A control: what is asserted above does depend on what recomputation keeps."""
    assert pool.run(WORLD, without_replay, "flat") == [(2, 2)] * WORLD
    assert torch.ops.titan_moe.exchange_counts.default in ROUTING_OPS
    assert torch.ops.titan_moe.exchange_tier_counts.default in ROUTING_OPS


@pytest.fixture
def _one_of_four() -> Iterator[None]:
    """A process group whose collectives leave outputs as they are."""
    dist.init_process_group("fake", rank=1, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def no_waiting(over: Any, damage: Callable[[Tensor], Any] = lambda x: None) -> None:
    """A whole layer, forward and backward, on tensors that have shapes but no values."""
    with FakeTensorMode():
        router = Router(
            D, E, 2, score_function="sigmoid", normalize_weights=True, route_scale=1.0, std=0.1
        )
        moe = MoE(router, Experts(E // WORLD, D, 8, std=0.1), None, balance=Balance())
        moe.force_balance, moe.dispatcher = True, over
        x_BSD = torch.randn(3, 5, D, requires_grad=True)
        out_BSD = moe(x_BSD, torch.ones(3, 5, dtype=torch.bool))
        damage(out_BSD)
        out_BSD.square().sum().backward()
        assert x_BSD.grad is not None
        assert x_BSD.grad.shape == x_BSD.shape


@pytest.mark.usefixtures("_one_of_four")
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_needs_values_under_forced_balance(backend: Backend) -> None:
    no_waiting(dispatcher(backend, DOMAIN, forced_balance=True))


@pytest.mark.usefixtures("_one_of_four")
@pytest.mark.parametrize(
    "damage",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).any()),
        lambda x: torch.arange(4).repeat_interleave((x.flatten()[:4] > 0).long()),
    ],
)
def test_what_needs_values_is_seen(damage: Callable[[Tensor], Any]) -> None:
    """A control of the one above."""
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        no_waiting(dispatcher("flat", DOMAIN, forced_balance=True), damage)


@pytest.mark.usefixtures("_one_of_four")
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_else_needs_values(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without forced balance, where the sizes are all that is known on the host."""
    known = [6, 9, 8, 7, 5, 9, 10, 6]  # splits and arriving: any, but 30 choices in all

    def flat_sizes(counts_E: Tensor, wire: int) -> tuple[Tensor, Any]:
        return counts_E.new_ones(WORLD, E // WORLD), Known([known[:WORLD], known[WORLD:]])

    def tier_sizes(counts_E: Tensor, visits_N: Tensor, across: int, inside: int) -> Any:
        return counts_E.new_ones(DOMAIN, E // WORLD), Known(known)

    monkeypatch.setattr(flat, "exchange_counts", flat_sizes)
    monkeypatch.setattr(two_tier, "exchange_tier_counts", tier_sizes)
    no_waiting(dispatcher(backend, DOMAIN))


class Known:
    """Numbers that are on the host, among tensors that have no values."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def tolist(self) -> list[Any]:
        return self._values

    def split(self, lengths: list[int]) -> list["Known"]:
        ends = itertools.accumulate(lengths)
        return [Known(self._values[end - n : end]) for n, end in zip(lengths, ends, strict=True)]


def test_there_is_one_door_to_the_host() -> None:
    """Copies to the host are invisible to tensors without values: none but one is written."""
    assert room.__file__ is not None
    written = {
        (path.name, node.attr)
        for path in sorted(Path(room.__file__).parent.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in WAITS
    }
    assert written == {("host_reads.py", "cpu")}
