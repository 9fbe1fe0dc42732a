"""Embedding and loss by parts of the vocabulary, against torch's on the whole of it.

B batch, S sequence, V vocabulary, D hidden.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from tests.tolerances import BF16_ROUNDED, FP32_REORDERED
from titan_moe.check.pool import Pool
from titan_moe.parallel.vocabulary import embed_slice, sliced_cross_entropy

B, S, V, D = 2, 6, 16, 5


def inputs(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Labels at both edges of every rank's part, one twice, some ignored."""
    generator = torch.Generator().manual_seed(3)
    logits_BSV = (torch.randn(B, S, V, generator=generator) * scale).to(dtype)
    labels_BS = torch.tensor([[0, 3, 4, 7, -100, 8], [11, 12, 15, 15, -100, 5]])
    return logits_BSV, labels_BS


def loss_and_gradient(scale: float, dtype: torch.dtype, ignore_all: bool) -> tuple[Tensor, Tensor]:
    logits_BSV, labels_BS = inputs(scale, dtype)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = logits_BSV.chunk(ranks, -1)[rank].clone().requires_grad_()
    labels_BS = torch.full_like(labels_BS, -100) if ignore_all else labels_BS
    assert dist.group.WORLD is not None
    loss = sliced_cross_entropy(part, labels_BS, dist.group.WORLD)
    (0.25 * loss).backward()
    assert part.grad is not None
    return loss.detach(), part.grad


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("scale", "dtype", "rtol"),
    [
        (1.0, torch.float32, FP32_REORDERED),
        (1e4, torch.float32, FP32_REORDERED),  # exp of such a number overflows
        (3.0, torch.bfloat16, BF16_ROUNDED),
    ],
)
def test_cross_entropy(
    pool: Pool, ranks: int, scale: float, dtype: torch.dtype, rtol: float
) -> None:
    logits_BSV, labels_BS = inputs(scale, dtype)
    logits_BSV.requires_grad_()
    expected = F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), reduction="sum"
    )
    (0.25 * expected).backward()
    assert logits_BSV.grad is not None
    answers = pool.run(ranks, loss_and_gradient, scale, dtype, False)
    gradient = torch.cat([part for _, part in answers], dim=-1)
    for loss, part in answers:
        assert (loss.dtype, part.dtype) == (torch.float32, dtype)
        torch.testing.assert_close(loss, expected.detach(), rtol=rtol, atol=0)
    torch.testing.assert_close(gradient, logits_BSV.grad, rtol=rtol, atol=rtol)


def test_nothing_to_predict(pool: Pool) -> None:
    for loss, gradient in pool.run(2, loss_and_gradient, 1.0, torch.float32, True):
        assert float(loss) == 0.0
        assert not gradient.any()


def embed() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    whole_VD = torch.randn(V, D, generator=generator)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight_vD = whole_VD.chunk(ranks)[rank].clone()
    weight_vD[0] += float("inf") if rank else 0.0  # nobody looks it up: it must not leak as nan
    weight_vD.requires_grad_()
    tokens_BS = torch.tensor([[0, 3, 3, 7], [1, 9, 15, 5]])
    assert dist.group.WORLD is not None
    share_BSD = embed_slice(tokens_BS, weight_vD, dist.group.WORLD)
    (share_BSD * torch.arange(D)).sum().backward()
    assert weight_vD.grad is not None
    return share_BSD.detach(), weight_vD.grad


def test_embedding(pool: Pool) -> None:
    generator = torch.Generator().manual_seed(5)
    whole_VD = torch.randn(V, D, generator=generator).requires_grad_()
    tokens_BS = torch.tensor([[0, 3, 3, 7], [1, 9, 15, 5]])
    expected_BSD = F.embedding(tokens_BS, whole_VD)
    (expected_BSD * torch.arange(D)).sum().backward()
    answers = pool.run(2, embed)
    assert torch.equal(answers[0][0] + answers[1][0], expected_BSD)
    assert whole_VD.grad is not None
    assert torch.equal(torch.cat([gradient for _, gradient in answers]), whole_VD.grad)
