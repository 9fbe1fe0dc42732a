"""Attention in blocks of queries: plain matmuls over the keys that a block can see, for CPUs.

A block of queries holds all of its scores at once, so the softmax needs no running statistics and
the backward forms it again from q and k. The largest tensor is [B, H, BLOCK, T]: linear in T. Keys
outside the span that a block can see are never touched. Two opaque operators carry it, so that
compilers and tracers see one node each, and spans may be read on the host.

B batch, S queries, T keys, H query heads = G key heads x R readers of each, D width of queries and
keys, V width of values, Q queries of one block, N keys in its span, L = B·G, M = R·Q.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_moe.layers.mask import AttentionMask

BLOCK = 128  # queries: smaller blocks skip more of the triangle, larger ones make better matmuls
MASKED = -1e30  # finite in bf16 too, and exactly 0 after the softmax


def blocked_attention(
    q_BSHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, scale: float, mask: AttentionMask | None
) -> Tensor:
    """See `attention`. Matmuls run in q's dtype, the softmax in fp32."""
    sides: list[Tensor] = []
    if mask is not None:
        sides = [mask.order_S, mask.order_T, mask.documents_BS, mask.documents_BT]
    return _forward(q_BSHD, k_BTGD, v_BTGV, scale, sides)


@torch.library.custom_op("titan_moe::blocked_attention", mutates_args=())
def _forward(
    q_BSHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, scale: float, sides: Sequence[Tensor]
) -> Tensor:
    q_LRSD, k_LTD, v_LTV = _by_key_head(q_BSHD, k_BTGD, v_BTGV)
    batch, readers = q_BSHD.shape[0], q_LRSD.shape[1]
    out_LRSV = q_LRSD.new_empty(*q_LRSD.shape[:3], v_LTV.shape[2])
    for block in _blocks(q_BSHD.shape[1], sides):
        q_LMD = q_LRSD[:, :, block.queries].flatten(1, 2)
        weights_LMN = _weights(q_LMD, k_LTD[:, block.keys], scale, block, batch)
        out_LMV = weights_LMN @ v_LTV[:, block.keys]
        out_LRSV[:, :, block.queries] = out_LMV.unflatten(1, (readers, -1))
    return _by_position(out_LRSV, batch)


@torch.library.custom_op("titan_moe::blocked_attention_backward", mutates_args=())
def _backward(
    grad_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    scale: float,
    sides: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    q_LRSD, k_LTD, v_LTV = _by_key_head(q_BSHD, k_BTGD, v_BTGV)
    grad_LRSV, _, _ = _by_key_head(grad_BSHV, k_BTGD, v_BTGV)
    batch, readers = q_BSHD.shape[0], q_LRSD.shape[1]
    dq_LRSD = torch.empty_like(q_LRSD)
    dk_LTD = torch.zeros_like(k_LTD, dtype=torch.float32)  # sums over blocks
    dv_LTV = torch.zeros_like(v_LTV, dtype=torch.float32)
    for block in _blocks(q_BSHD.shape[1], sides):
        q_LMD = q_LRSD[:, :, block.queries].flatten(1, 2)
        grad_LMV = grad_LRSV[:, :, block.queries].flatten(1, 2)
        k_LND, v_LNV = k_LTD[:, block.keys], v_LTV[:, block.keys]
        weights_LMN = _weights(q_LMD, k_LND, scale, block, batch)
        dv_LTV[:, block.keys] += weights_LMN.transpose(1, 2) @ grad_LMV
        dweights_LMN = grad_LMV @ v_LNV.transpose(1, 2)
        # Fused weights * (dweights - sum(dweights * weights)), fp32 inside.
        dscores_LMN = torch._softmax_backward_data(dweights_LMN, weights_LMN, -1, q_LMD.dtype)
        dq_LMD = _scaled_bmm(dscores_LMN, k_LND, scale)
        dq_LRSD[:, :, block.queries] = dq_LMD.unflatten(1, (readers, -1))
        dk_LTD[:, block.keys] += dscores_LMN.transpose(1, 2) @ q_LMD
    dk_LTD.mul_(scale)
    dk_BTGD = _by_position(dk_LTD.to(k_LTD.dtype).unsqueeze(1), batch)
    dv_BTGV = _by_position(dv_LTV.to(v_LTV.dtype).unsqueeze(1), batch)
    return _by_position(dq_LRSD, batch), dk_BTGD, dv_BTGV


@_forward.register_fake
def _(
    q_BSHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, scale: float, sides: Sequence[Tensor]
) -> Tensor:
    return q_BSHD.new_empty(*q_BSHD.shape[:3], v_BTGV.shape[3])


@_backward.register_fake
def _(
    grad_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    scale: float,
    sides: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q_BSHD, k_BTGD, v_BTGV))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q_BSHD, k_BTGD, v_BTGV, ctx.scale, sides = inputs
    ctx.save_for_backward(q_BSHD, k_BTGD, v_BTGV, *sides)


def _differentiate(ctx: Any, grad_BSHV: Tensor) -> tuple[Any, ...]:
    q_BSHD, k_BTGD, v_BTGV, *sides = ctx.saved_tensors
    gradients = _backward(grad_BSHV, q_BSHD, k_BTGD, v_BTGV, ctx.scale, sides)
    return *gradients, None, [None] * len(sides)


_forward.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class _Block:
    """A run of queries, and the span of keys that contains all that any of them sees.

    hidden: bool, [B or 1, Q, keys from `edge` on]; the keys of the span before `edge` (counted
        from its start) are seen by every query of the block, in every row of the batch.
    """

    queries: slice
    keys: slice
    edge: int
    hidden: Tensor


def _blocks(num_queries: int, sides: Sequence[Tensor]) -> Iterator[_Block]:
    for start in range(0, num_queries, BLOCK):
        queries = slice(start, min(start + BLOCK, num_queries))
        if not sides:
            size = queries.stop - start
            later_QQ = torch.ones(size, size, dtype=torch.bool).triu(1)
            yield _Block(queries, slice(0, queries.stop), start, later_QQ[None])
            continue
        order_S, order_T, documents_BS, documents_BT = sides
        visible_BQT = order_S[queries, None] >= order_T
        visible_BQT = visible_BQT & (documents_BS[:, queries, None] == documents_BT[:, None])
        seen = visible_BQT.flatten(0, 1).any(0).nonzero()
        assert len(seen), "every query sees at least itself"
        keys = slice(int(seen[0]), int(seen[-1]) + 1)
        visible_BQN = visible_BQT[:, :, keys]
        by_all_N = visible_BQN.flatten(0, 1).all(0)
        edge = int(by_all_N.int().cumprod(0).sum())
        yield _Block(queries, keys, edge, ~visible_BQN[:, :, edge:])


def _weights(q_LMD: Tensor, k_LND: Tensor, scale: float, block: _Block, batch: int) -> Tensor:
    """Softmax over the block's span: statistics in fp32, result in q's dtype."""
    scores_LMN = _scaled_bmm(q_LMD, k_LND.transpose(1, 2), scale)
    queries = block.queries.stop - block.queries.start
    scores_BGRQN = scores_LMN.view(batch, -1, q_LMD.shape[1] // queries, queries, k_LND.shape[1])
    scores_BGRQN[..., block.edge :].masked_fill_(block.hidden[:, None, None], MASKED)
    return scores_LMN.softmax(-1)


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`scale * (a @ b)`, scaled before the result is rounded to its dtype."""
    ignored = a.new_empty(())
    return torch.baddbmm(ignored, a, b, beta=0, alpha=scale)


def _by_key_head(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads before positions, readers of one key head side by side."""
    heads = k_BTGD.shape[2]
    q_BGRSD = q_BSHD.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
    k_LTD, v_LTV = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (k_BTGD, v_BTGV))
    return q_BGRSD.flatten(0, 1).contiguous(), k_LTD, v_LTV


def _by_position(x_LRSD: Tensor, batch: int) -> Tensor:
    """Back to [B, S, H, D]."""
    return x_LRSD.unflatten(0, (batch, -1)).flatten(1, 2).transpose(1, 2).contiguous()
