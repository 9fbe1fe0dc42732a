"""FlexAttention (arXiv 2412.05496): documents, windows and sinks in linear memory. CUDA only.

B batch, S queries, T keys, H query heads, G key heads, D width of queries and keys, V of values.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from titan_moe.layers.mask import AttentionMask


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Uncompiled, flex_attention would form every score, and create_block_mask the whole mask."""
    return torch.compile(function)


@functools.lru_cache(maxsize=4)
def block_mask_of(
    mask: AttentionMask | None, window: int | None, tokens: int, device: torch.device
) -> BlockMask:
    """Which blocks of keys each block of queries visits, and which of them need a closer look.

    tokens: of a whole row, whatever slice of it the queries are. Kept for the next layers, which
    have the same mask, and some of them another window.
    """
    documents_BS = documents_BT = None
    if mask is None:
        order_S = order_T = torch.arange(tokens, device=device)
    else:
        order_S, order_T = mask.order_S, mask.order_T
        documents_BS, documents_BT = mask.documents_BS, mask.documents_BT

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = order_S[query] - order_T[key]
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        if documents_BS is not None and documents_BT is not None:
            seen = seen & (documents_BS[batch, query] == documents_BT[batch, key])
        return seen

    return _compiled(create_block_mask)(
        visible,
        B=None if documents_BS is None else len(documents_BS),
        H=None,
        Q_LEN=len(order_S),
        KV_LEN=len(order_T),
        device=device,
    )


def flex(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    scale: float,
    mask: AttentionMask | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `attention`. Raises ValueError off CUDA."""
    if q_BSHD.device.type != "cuda":
        raise ValueError(
            f'attention backend "flex" runs on CUDA, not on {q_BSHD.device.type}: leave '
            "training.attention_backend at auto"
        )
    block_mask = block_mask_of(mask, window, k_BTGD.shape[1], k_BTGD.device)
    return _compiled(attend)(q_BSHD, k_BTGD, v_BTGV, sinks_H, scale, block_mask)


def attend(
    q_BSHD: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    sinks_H: Tensor | None,
    scale: float,
    block_mask: BlockMask,
) -> Tensor:
    """`flex` where the mask is made already. To be compiled."""
    q_BHSD, k_BGTD, v_BGTV = (x.transpose(1, 2) for x in (q_BSHD, k_BTGD, v_BTGV))
    grouped = q_BSHD.shape[2] != k_BTGD.shape[2]
    settings: dict[str, Any] = {"block_mask": block_mask, "scale": scale, "enable_gqa": grouped}
    if sinks_H is None:
        return flex_attention(q_BHSD, k_BGTD, v_BGTV, **settings).transpose(1, 2)
    out_BHSV, aux = flex_attention(
        q_BHSD, k_BGTD, v_BGTV, **settings, return_aux=AuxRequest(lse=True)
    )
    return beside_sinks(out_BHSV, aux.lse, sinks_H).transpose(1, 2)


def beside_sinks(out_BHSV: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Attention with sinks from that without, and from the log of the sum that divided it.

    What keys have left of the softmax is e^lse / (e^lse + e^sink) = sigmoid(lse - sink).
    """
    share_BHS = torch.sigmoid(lse_BHS.float() - sinks_H.float()[:, None])
    return (out_BHSV * share_BHS[..., None]).to(out_BHSV.dtype)
