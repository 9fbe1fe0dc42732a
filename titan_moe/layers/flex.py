"""FlexAttention (arXiv 2412.05496): document masks on CUDA, in linear memory. CUDA only.

B batch, S queries, T keys, H query heads, G key heads, D width of queries and keys, V of values.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from titan_moe.layers.mask import AttentionMask


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Uncompiled, flex_attention would form every score, and create_block_mask the whole mask."""
    return torch.compile(function)


@functools.lru_cache(maxsize=1)
def block_mask_of(mask: AttentionMask) -> BlockMask:
    """Which blocks of keys each block of queries visits, and which of them need a closer look.

    Kept for the next layer, which has the same mask.
    """
    order_S, order_T = mask.order_S, mask.order_T
    documents_BS, documents_BT = mask.documents_BS, mask.documents_BT

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_document = documents_BS[batch, query] == documents_BT[batch, key]
        return same_document & (order_S[query] >= order_T[key])

    return _compiled(create_block_mask)(
        visible,
        B=documents_BS.shape[0],
        H=None,
        Q_LEN=documents_BS.shape[1],
        KV_LEN=documents_BT.shape[1],
        device=documents_BS.device,
    )


def flex(
    q_BSHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, scale: float, mask: AttentionMask | None
) -> Tensor:
    """See `attention`. Raises ValueError off CUDA, and where there is no mask."""
    if q_BSHD.device.type != "cuda":
        raise ValueError(
            f'attention backend "flex" runs on CUDA, not on {q_BSHD.device.type}: leave '
            "training.attention_backend at auto"
        )
    if mask is None:
        raise ValueError(
            'attention backend "flex" is for document masks: with training.document_mask = false '
            "set training.attention_backend to sdpa"
        )
    out_BHSV = _compiled(flex_attention)(
        q_BSHD.transpose(1, 2),
        k_BTGD.transpose(1, 2),
        v_BTGV.transpose(1, 2),
        block_mask=block_mask_of(mask),
        scale=scale,
        enable_gqa=q_BSHD.shape[2] != k_BTGD.shape[2],
    )
    return out_BHSV.transpose(1, 2)
