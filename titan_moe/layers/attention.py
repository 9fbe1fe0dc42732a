"""Attention behind one function, with a backend for each place it runs.

B batch, S queries, T keys, H query heads, G key heads (G divides H; query head h reads key head
h // (H/G)), D width of queries and keys, V width of values.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_moe.layers.blocked import blocked_attention
from titan_moe.layers.mask import AttentionMask

LINEAR_MEMORY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]

# (q_BSHD, k_BTGD, v_BTGV, scale, mask, window, sinks_H) -> out_BSHV
Kernel = Callable[
    [Tensor, Tensor, Tensor, float, AttentionMask | None, int | None, Tensor | None], Tensor
]


def attention(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    *,
    scale: float,
    mask: AttentionMask | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    backend: str | Kernel = "auto",
) -> Tensor:
    """softmax(scale * q·k over visible keys) · v, [B, S, H, V], in q's dtype.

    mask: None is plain causal over whole rows (S == T).
    window: a query sees the last so many keys alone, itself among them.
    sinks_H: a score of each head that takes part in the softmax, unscaled, and has no value.
    backend: "reference" (naive, quadratic memory), "sdpa" (torch's fused kernels, plain causal),
        "blocked" (matmuls over blocks of queries, for CPUs), "flex" (FlexAttention, CUDA), or
        "auto": blocked on CPU; on CUDA flex where there is a mask, a window or sinks, else sdpa.
        Memory is linear in S + T on all but the reference. Or a kernel of the caller's.

    Raises ValueError for an unknown backend, and for one that cannot do what is asked.
    """
    assert q_BSHD.shape[2] % k_BTGD.shape[2] == 0, "key heads must divide query heads"
    assert mask is not None or q_BSHD.shape[1] == k_BTGD.shape[1], "slices need a mask"
    assert window is None or window > 0, "a query sees at least itself"
    if window is not None and window >= k_BTGD.shape[1]:
        window = None  # nothing is further away
    if backend == "auto":
        backend = backend_for(q_BSHD.device.type, mask, window, sinks_H)
    if not isinstance(backend, str):
        return backend(q_BSHD, k_BTGD, v_BTGV, scale, mask, window, sinks_H)
    if backend == "blocked":
        return blocked_attention(q_BSHD, k_BTGD, v_BTGV, scale, mask, window, sinks_H)
    if backend == "sdpa":
        return _sdpa(q_BSHD, k_BTGD, v_BTGV, scale, mask, window, sinks_H)
    if backend == "flex":
        from titan_moe.layers.flex import flex  # imports a compiler

        return flex(q_BSHD, k_BTGD, v_BTGV, scale, mask, window, sinks_H)
    if backend == "reference":
        return _reference(q_BSHD, k_BTGD, v_BTGV, scale, mask, window, sinks_H)
    raise ValueError(
        f'attention backend "{backend}" is unknown: auto, blocked, sdpa, flex or reference'
    )


def backend_for(
    device_type: str,
    mask: AttentionMask | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> str:
    """What "auto" stands for. Raises ValueError where nothing is known to be right."""
    if device_type in ("cpu", "meta"):
        return "blocked"
    if device_type == "cuda":
        return "sdpa" if mask is None and window is None and sinks_H is None else "flex"
    raise ValueError(
        f"no attention backend is chosen by itself on {device_type}: set "
        "training.attention_backend to sdpa or reference"
    )


def _reference(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    scale: float,
    mask: AttentionMask | None,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    k_BTHD, v_BTHV = _per_query_head(k_BTGD, v_BTGV, q_BSHD.shape[2])
    scores_BHST = torch.einsum("bshd,bthd->bhst", q_BSHD.float(), k_BTHD.float()) * scale
    if mask is None:
        visible_BST = torch.ones_like(scores_BHST[:, 0], dtype=torch.bool).tril()
        if window is not None:
            visible_BST = visible_BST.triu(1 - window)
    else:
        visible_BST = mask.visible()
        if window is not None:
            visible_BST = visible_BST & (mask.order_S[:, None] - mask.order_T < window)
    scores_BHST = scores_BHST.masked_fill(~visible_BST[:, None], float("-inf"))
    if sinks_H is None:
        weights_BHST = scores_BHST.softmax(-1)
    else:
        sinks_BHS1 = sinks_H.float()[:, None, None].expand(*scores_BHST.shape[:3], 1)
        weights_BHST = torch.cat([scores_BHST, sinks_BHS1], dim=-1).softmax(-1)[..., :-1]
    out_BSHV = torch.einsum("bhst,bthv->bshv", weights_BHST, v_BTHV.float())
    return out_BSHV.to(q_BSHD.dtype)


def _sdpa(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    scale: float,
    mask: AttentionMask | None,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    if window is not None or sinks_H is not None:
        kind = "windows" if sinks_H is None else "sinks"
        raise ValueError(
            f'attention backend "sdpa" has no {kind}: leave training.attention_backend at auto, '
            "or set it to flex (CUDA) or blocked (CPU)"
        )
    if mask is not None:
        raise ValueError(
            'attention backend "sdpa" cannot mask documents in linear memory: set '
            "training.document_mask = false, or training.attention_backend to flex (CUDA) or "
            "blocked (CPU)"
        )
    k_BTHD, v_BTHV = _per_query_head(k_BTGD, v_BTGV, q_BSHD.shape[2])
    # The fused kernels want one width; with two, torch falls back to a quadratic one. Zeros add
    # nothing to q·k, and the columns that they make in the output are cut off.
    width = max(q_BSHD.shape[3], v_BTHV.shape[3])
    q, k, v = (F.pad(x, (0, width - x.shape[3])).transpose(1, 2) for x in (q_BSHD, k_BTHD, v_BTHV))
    with sdpa_kernel(LINEAR_MEMORY):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.transpose(1, 2)[..., : v_BTGV.shape[3]]


def _per_query_head(k_BTGD: Tensor, v_BTGV: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for each query head that reads them."""
    repeats = num_heads // k_BTGD.shape[2]
    if repeats == 1:
        return k_BTGD, v_BTGV
    return k_BTGD.repeat_interleave(repeats, dim=2), v_BTGV.repeat_interleave(repeats, dim=2)
