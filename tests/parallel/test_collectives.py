"""Forward against what the inputs of all ranks say; backward against the gradient of one loss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from titan_moe.check.pool import Pool
from titan_moe.parallel import collectives

Differentiable = Callable[..., Tensor]

# [B, S, D] of each rank, S and D slices of which ranks may hold.
SHAPE = (3, 4, 8)


def numbers(rank: int, what: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * what + rank)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def weights(shape: torch.Size, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def forward_and_back(
    name: str, dim: int | None, same_input: bool, same_loss: bool
) -> tuple[Tensor, Tensor]:
    """On a rank: its output, and its input's gradient of sum(weights · output)."""
    rank, group = dist.get_rank(), dist.group.WORLD
    x = numbers(0 if same_input else rank, 1).requires_grad_()
    function: Differentiable = getattr(collectives, name)
    y = function(x, group) if dim is None else function(x, dim, group)
    (y * weights(y.shape, 0 if same_loss else rank)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def by_hand(
    name: str, dim: int | None, same_input: bool, same_loss: bool, ranks: int
) -> list[tuple[Tensor, Tensor]]:
    """The same in one process that has every rank's input, by autograd through plain torch."""
    xs = [numbers(0 if same_input else rank, 1).requires_grad_() for rank in range(ranks)]
    shared = xs[0]  # what all ranks hold is one tensor
    along = dim if dim is not None else 0
    if name in ("all_gather", "join_slices"):
        ys = [torch.cat(xs, dim=along)] * ranks
    elif name == "reduce_scatter":
        ys = list(torch.stack(xs).sum(0).chunk(ranks, along))
    elif name == "own_slice":
        ys = list(shared.chunk(ranks, along))
    elif name == "all_reduce":
        ys = [torch.stack(xs).sum(0)] * ranks
    else:
        ys = [shared] * ranks
    # A loss that all ranks form alike is one loss, not as many as there are ranks.
    of_ranks = ys[:1] if same_loss else ys
    loss = sum(((y * weights(y.shape, rank)).sum() for rank, y in enumerate(of_ranks)), Tensor([0]))
    loss.backward()
    gradients = [shared.grad if same_input else x.grad for x in xs]
    return [(y.detach(), g) for y, g in zip(ys, gradients, strict=True) if g is not None]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "dim", "same_input", "same_loss"),
    [
        ("all_gather", 1, False, False),
        ("all_gather", -1, False, False),
        ("reduce_scatter", 1, False, False),
        ("reduce_scatter", -1, False, False),
        ("all_reduce", None, False, True),
        ("all_reduce_back", None, True, False),
        ("own_slice", 1, True, False),
        ("join_slices", 1, False, True),
        ("join_slices", -1, False, True),
    ],
)
def test_values_and_gradients(
    pool: Pool, name: str, dim: int | None, same_input: bool, same_loss: bool, ranks: int
) -> None:
    got = pool.run(ranks, forward_and_back, name, dim, same_input, same_loss)
    expected = by_hand(name, dim, same_input, same_loss, ranks)
    assert len(got) == len(expected) == ranks
    for (y, gradient), (wanted_y, wanted_gradient) in zip(got, expected, strict=True):
        torch.testing.assert_close(y, wanted_y, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-14, atol=1e-14)


def uneven() -> None:
    collectives.own_slice(torch.zeros(2, 5), 1, dist.group.WORLD)


def test_uneven_slices_are_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"\(2, 5\) in 2 along 1"):
        pool.run(2, uneven)
