"""Tokens that visit experts on several ranks, and the same visits taken one by one in one process.

T tokens of a rank, D hidden, K experts chosen per token, E experts of all ranks, e of one rank, R
rows. Expert e maps a row x to tanh(x @ A_e).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.parallel.dispatch.flat import FlatDispatcher
from titan_moe.parallel.dispatch.two_tier import TwoTierDispatcher, tiers
from titan_moe.parallel.dispatch.wire import Traffic, Wire

D, E = 8, 16
Backend = Literal["flat", "two_tier"]
BACKENDS: tuple[Backend, ...] = ("flat", "two_tier")


@dataclass(frozen=True)
class Visits:
    """ids: for each rank, for each of its tokens, the experts that it chose."""

    ids: list[list[list[int]]]
    top_k: int = 2
    forced_balance: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def ranks(self) -> int:
        return len(self.ids)

    def ids_of(self, rank: int) -> Tensor:
        return torch.tensor(self.ids[rank], dtype=torch.int64).view(-1, self.top_k)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """x_TD, weights_TK and the gradient of the output; no two elements are the same."""
        generator = torch.Generator().manual_seed(100 + rank)
        tokens = len(self.ids[rank])
        x_TD = torch.randn(tokens, D, generator=generator).to(self.dtype)
        weights_TK = torch.rand(tokens, self.top_k, generator=generator)
        return x_TD, weights_TK, torch.randn(tokens, D, generator=generator)


@dataclass
class Outcome:
    """Of one rank: out_TD, and the gradients of x_TD, weights_TK and its experts' matrices."""

    out: Tensor
    x_grad: Tensor
    weights_grad: Tensor
    matrices_grad: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.out, self.x_grad, self.weights_grad, self.matrices_grad]


def matrices() -> Tensor:
    """A_e of all experts, [E, D, D]."""
    return torch.randn(E, D, D, generator=torch.Generator().manual_seed(1)) * 0.5


def one_by_one(visits: Visits) -> list[Outcome]:
    """In fp64, token by token, choice by choice."""
    matrices_EDD = matrices().double().requires_grad_()
    leaves, outs, total = [], [], torch.zeros((), dtype=torch.float64)
    for rank, ids in enumerate(visits.ids):
        x_TD, weights_TK, grad_TD = (tensor.double() for tensor in visits.inputs(rank))
        x_TD.requires_grad_()
        weights_TK.requires_grad_()
        rows = []
        for t, chosen in enumerate(ids):
            row_D = torch.zeros(D, dtype=torch.float64)
            for k, expert in enumerate(chosen):
                row_D = row_D + weights_TK[t, k] * torch.tanh(x_TD[t] @ matrices_EDD[expert])
            rows.append(row_D)
        out_TD = torch.stack(rows) if rows else torch.zeros(0, D, dtype=torch.float64)
        total = total + (out_TD * grad_TD).sum()
        leaves.append((x_TD, weights_TK))
        outs.append(out_TD.detach())
    if total.requires_grad:
        total.backward()
    held = E // visits.ranks
    grads_E = torch.zeros_like(matrices_EDD) if matrices_EDD.grad is None else matrices_EDD.grad
    return [
        Outcome(
            out,
            torch.zeros_like(x) if x.grad is None else x.grad,
            torch.zeros_like(weights) if weights.grad is None else weights.grad,
            grads_E[rank * held : (rank + 1) * held],
        )
        for rank, (out, (x, weights)) in enumerate(zip(outs, leaves, strict=True))
    ]


def dispatcher(backend: Backend, domain: int | None, *, forced_balance: bool = False) -> Any:
    """Over the whole world of this case."""
    group, traffic = dist.group.WORLD, Traffic()
    assert group is not None
    if backend == "flat":
        return FlatDispatcher(Wire(group, domain, traffic), E, forced_balance=forced_balance)
    assert domain is not None
    across, inside = (Wire(tier, domain, traffic) for tier in tiers(group, domain))
    return TwoTierDispatcher(across, inside, E, forced_balance=forced_balance)


def local_matrices() -> Tensor:
    held = E // dist.get_world_size()
    return matrices()[dist.get_rank() * held :][:held].clone().requires_grad_()


def experts(rows_RD: Tensor, offsets_e: Tensor, matrices_eDD: Tensor) -> Tensor:
    """Computed in fp32, given back in the rows' dtype."""
    sizes = offsets_e.diff(prepend=offsets_e.new_zeros(1)).tolist()
    pieces = zip(rows_RD.split(sizes), matrices_eDD, strict=True)
    return torch.cat([torch.tanh(piece.float() @ a) for piece, a in pieces]).to(rows_RD.dtype)


def visit(dispatch_with: Any, visits: Visits) -> Outcome:
    """Forward and backward on this rank."""
    rank, matrices_eDD = dist.get_rank(), local_matrices()
    x_TD, weights_TK, grad_TD = visits.inputs(rank)
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    rows_RD, row_weights_R, offsets_e, handle = dispatch_with.dispatch(
        x_TD, visits.ids_of(rank), weights_TK
    )
    weighted_RD = experts(rows_RD, offsets_e, matrices_eDD).float() * row_weights_R[:, None]
    out_TD = dispatch_with.combine(weighted_RD, handle)
    out_TD.backward(grad_TD)
    grads = [leaf.grad for leaf in (x_TD, weights_TK, matrices_eDD)]
    assert out_TD.dtype == torch.float32
    assert all(grad is not None for grad in grads)
    return Outcome(out_TD.detach(), *grads)  # type: ignore[arg-type]


def spread(tokens: list[int], top_k: int = 2, seed: int = 0) -> list[list[list[int]]]:
    """Distinct random experts for so many tokens on each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randperm(E, generator=generator)[:top_k].tolist() for _ in range(count)]
        for count in tokens
    ]


def same_for_all(tokens: list[int], choose: Callable[[int], list[int]]) -> list[list[list[int]]]:
    """choose(t): the experts of a rank's token t."""
    return [[choose(t) for t in range(count)] for count in tokens]
