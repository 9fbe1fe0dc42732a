"""Attention in blocks of queries: plain matmuls over the keys that a block can see, for CPUs.

A block of queries holds all of its scores at once, so the softmax needs no running statistics and
the backward forms it again from q and k. The largest tensor is [B, H, BLOCK, T]: linear in T. Keys
outside the span that a block can see are never touched, be it for documents or for a window. A
sink is one more column of scores, after those of the span. Two opaque operators carry it, so that
compilers and tracers see one node each, and spans may be read on the host.

B batch, S queries, T keys, H query heads = G key heads x R readers of each, D width of queries and
keys, V width of values, Q queries of one block, N keys in its span, W those and the sink if there
is one, L = B·G, M = R·Q.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.layers.mask import AttentionMask

BLOCK = 128  # queries: smaller blocks skip more of the triangle, larger ones make better matmuls
MASKED = -1e30  # finite in bf16 too, and exactly 0 after the softmax


def blocked_attention(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    scale: float,
    mask: AttentionMask | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `attention`. Matmuls run in q's dtype, the softmax in fp32."""
    sides: list[Tensor] = []
    if mask is not None:
        sides = [mask.order_S, mask.order_T, mask.documents_BS, mask.documents_BT]
    return _forward(q_BSHD, k_BTGD, v_BTGV, sinks_H, scale, window, sides)


@torch.library.custom_op("titan_moe::blocked_attention", mutates_args=())
def _forward(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    window: int | None,
    sides: Sequence[Tensor],
) -> Tensor:
    q_LRSD, k_LTD, v_LTV = _by_key_head(q_BSHD, k_BTGD, v_BTGV)
    batch, readers = q_BSHD.shape[0], q_LRSD.shape[1]
    out_LRSV = q_LRSD.new_empty(*q_LRSD.shape[:3], v_LTV.shape[2])
    for block in _blocks(q_BSHD, sides, window):
        q_LMD = q_LRSD[:, :, block.queries].flatten(1, 2)
        weights_LMW = _weights(q_LMD, k_LTD[:, block.keys], sinks_H, scale, block, batch)
        out_LMV = weights_LMW[..., : block.span] @ v_LTV[:, block.keys]
        out_LRSV[:, :, block.queries] = out_LMV.unflatten(1, (readers, -1))
    return _by_position(out_LRSV, batch)


@torch.library.custom_op("titan_moe::blocked_attention_backward", mutates_args=())
def _backward(
    grad_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    window: int | None,
    sides: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of q, k and v, and of the sinks where there are any."""
    q_LRSD, k_LTD, v_LTV = _by_key_head(q_BSHD, k_BTGD, v_BTGV)
    grad_LRSV, _, _ = _by_key_head(grad_BSHV, k_BTGD, v_BTGV)
    batch, readers = q_BSHD.shape[0], q_LRSD.shape[1]
    dq_LRSD = torch.empty_like(q_LRSD)
    dk_LTD = torch.zeros_like(k_LTD, dtype=torch.float32)  # sums over blocks
    dv_LTV = torch.zeros_like(v_LTV, dtype=torch.float32)
    dsinks_LR = torch.zeros_like(q_LRSD[:, :, 0, 0], dtype=torch.float32)
    for block in _blocks(q_BSHD, sides, window):
        q_LMD = q_LRSD[:, :, block.queries].flatten(1, 2)
        grad_LMV = grad_LRSV[:, :, block.queries].flatten(1, 2)
        k_LND, v_LNV = k_LTD[:, block.keys], v_LTV[:, block.keys]
        weights_LMW = _weights(q_LMD, k_LND, sinks_H, scale, block, batch)
        dv_LTV[:, block.keys] += weights_LMW[..., : block.span].transpose(1, 2) @ grad_LMV
        dweights_LMW = grad_LMV @ v_LNV.transpose(1, 2)
        if sinks_H is not None:
            dweights_LMW = F.pad(dweights_LMW, (0, 1))  # a sink has no value
        # Fused weights * (dweights - sum(dweights * weights)), fp32 inside.
        dscores_LMW = torch._softmax_backward_data(dweights_LMW, weights_LMW, -1, q_LMD.dtype)
        dscores_LMN = dscores_LMW[..., : block.span]
        dq_LMD = _scaled_bmm(dscores_LMN, k_LND, scale)
        dq_LRSD[:, :, block.queries] = dq_LMD.unflatten(1, (readers, -1))
        dk_LTD[:, block.keys] += dscores_LMN.transpose(1, 2) @ q_LMD
        if sinks_H is not None:
            dsinks_LR += dscores_LMW[..., -1].float().unflatten(1, (readers, -1)).sum(2)
    dk_LTD.mul_(scale)
    dk_BTGD = _by_position(dk_LTD.to(k_LTD.dtype).unsqueeze(1), batch)
    dv_BTGV = _by_position(dv_LTV.to(v_LTV.dtype).unsqueeze(1), batch)
    gradients = [_by_position(dq_LRSD, batch), dk_BTGD, dv_BTGV]
    if sinks_H is not None:
        gradients.append(dsinks_LR.view(batch, -1).sum(0).to(sinks_H.dtype))
    return gradients


@_forward.register_fake
def _(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    window: int | None,
    sides: Sequence[Tensor],
) -> Tensor:
    return q_BSHD.new_empty(*q_BSHD.shape[:3], v_BTGV.shape[3])


@_backward.register_fake
def _(
    grad_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    window: int | None,
    sides: Sequence[Tensor],
) -> list[Tensor]:
    inputs = (q_BSHD, k_BTGD, v_BTGV, sinks_H)
    return [x.new_empty(x.shape) for x in inputs if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q_BSHD, k_BTGD, v_BTGV, sinks_H, ctx.scale, ctx.window, sides = inputs
    ctx.save_for_backward(q_BSHD, k_BTGD, v_BTGV, sinks_H, *sides)


def _differentiate(ctx: Any, grad_BSHV: Tensor) -> tuple[Any, ...]:
    q_BSHD, k_BTGD, v_BTGV, sinks_H, *sides = ctx.saved_tensors
    dq_BSHD, dk_BTGD, dv_BTGV, *dsinks = _backward(
        grad_BSHV, q_BSHD, k_BTGD, v_BTGV, sinks_H, ctx.scale, ctx.window, sides
    )
    dsinks_H = dsinks[0] if dsinks else None
    return dq_BSHD, dk_BTGD, dv_BTGV, dsinks_H, None, None, [None] * len(sides)


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

    @property
    def span(self) -> int:
        return self.keys.stop - self.keys.start


def _blocks(q_BSHD: Tensor, sides: Sequence[Tensor], window: int | None) -> Iterator[_Block]:
    for start in range(0, q_BSHD.shape[1], BLOCK):
        queries = slice(start, min(start + BLOCK, q_BSHD.shape[1]))
        if not sides:
            yield _block_of_rows(queries, window, q_BSHD.device)
            continue
        order_S, order_T, documents_BS, documents_BT = sides
        visible_QT = _near(order_S[queries, None] - order_T, window)
        visible_BQT = visible_QT & (documents_BS[:, queries, None] == documents_BT[:, None])
        seen = visible_BQT.flatten(0, 1).any(0).nonzero()
        assert len(seen), "every query sees at least itself"
        keys = slice(int(seen[0]), int(seen[-1]) + 1)
        visible_BQN = visible_BQT[:, :, keys]
        by_all_N = visible_BQN.flatten(0, 1).all(0)
        edge = int(by_all_N.int().cumprod(0).sum())
        yield _Block(queries, keys, edge, ~visible_BQN[:, :, edge:])


def _block_of_rows(queries: slice, window: int | None, device: torch.device) -> _Block:
    """Where both sides are whole rows, and order alone says who sees whom."""
    first = 0 if window is None else max(0, queries.start - window + 1)
    by_all = window is None or queries.stop <= window  # the last query sees the row's beginning
    edge = queries.start - first if by_all else 0
    order_Q = torch.arange(queries.start, queries.stop, device=device)
    order_N = torch.arange(first + edge, queries.stop, device=device)
    visible_QN = _near(order_Q[:, None] - order_N, window)
    return _Block(queries, slice(first, queries.stop), edge, ~visible_QN[None])


def _near(distance: Tensor, window: int | None) -> Tensor:
    """Whether a query sees a key that comes so far before it."""
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance < window)


def _weights(
    q_LMD: Tensor,
    k_LND: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    block: _Block,
    batch: int,
) -> Tensor:
    """weights_LMW, a softmax over span and sink: statistics in fp32, result in q's dtype."""
    scores_LMN = _scaled_bmm(q_LMD, k_LND.transpose(1, 2), scale)
    queries = block.queries.stop - block.queries.start
    scores_BGRQN = scores_LMN.view(batch, -1, q_LMD.shape[1] // queries, queries, block.span)
    scores_BGRQN[..., block.edge :].masked_fill_(block.hidden[:, None, None], MASKED)
    if sinks_H is None:
        return scores_LMN.softmax(-1)
    sinks_GR11 = sinks_H.to(q_LMD.dtype).view(*scores_BGRQN.shape[1:3], 1, 1)
    sinks_BGRQ1 = sinks_GR11.expand(batch, -1, -1, queries, -1)
    scores_LMW = torch.cat([scores_BGRQN, sinks_BGRQ1], dim=-1).view(*q_LMD.shape[:2], -1)
    return scores_LMW.softmax(-1)


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
