"""Grouped-query attention with normed heads, softmax-routed experts, tied embeddings.

B batch, S sequence, D hidden.
"""

from torch import Tensor, nn

from titan_moe.layers.context import Context
from titan_moe.layers.decoder import Decoder
from titan_moe.layers.experts import Experts
from titan_moe.layers.grouped_query import GroupedQueryAttention
from titan_moe.layers.moe import MoE
from titan_moe.layers.norm import RMSNorm
from titan_moe.layers.rope import Rope
from titan_moe.layers.router import Router

from .config import GroupedQueryConfig


class Block(nn.Module):
    """Pre-norm: attention, then experts."""

    def __init__(self, cfg: GroupedQueryConfig, layer: int) -> None:
        super().__init__()
        hidden, std = cfg.hidden_size, cfg.initializer_range
        self.attention_norm = RMSNorm(hidden, eps=cfg.norm_eps)
        self.attention = GroupedQueryAttention(
            hidden,
            cfg.num_heads,
            cfg.num_kv_heads,
            cfg.head_dim,
            std=std,
            norm="head",
            norm_eps=cfg.norm_eps,
        )
        self.moe_norm = RMSNorm(hidden, eps=cfg.norm_eps)
        router = Router(
            hidden,
            cfg.num_experts,
            cfg.top_k,
            score_function="softmax",
            normalize_weights=False,
            route_scale=1.0,
            std=std,
        )
        experts = Experts(cfg.num_experts, hidden, cfg.moe_intermediate_size, std=std)
        self.moe = MoE(router, experts, None, balance=cfg.balance(layer))

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), context)
        return x_BSD + self.moe(self.moe_norm(x_BSD), context.valid_BS)


class Model(Decoder):
    """The head's output is the embedding's weight, so that a part with a head holds it too, under
    the one name `embedding.weight`.
    """

    def __init__(
        self, cfg: GroupedQueryConfig, *, layers: range, has_embedding: bool, has_head: bool
    ) -> None:
        rope = Rope(cfg.head_dim, cfg.rope_theta, cfg.max_seq_len, cfg.rope_scaling)
        super().__init__(
            cfg,
            layers=layers,
            has_embedding=has_embedding or has_head,
            has_head=has_head,
            rope=rope,
            block=lambda layer: Block(cfg, layer),
        )
        self.embeds = has_embedding
        if self.head is not None:
            assert self.embedding is not None
            self.head.output.weight = self.embedding.weight

    def forward(
        self, x: Tensor, *, positions_BS: Tensor, document_ids_BS: Tensor, tokens_BS: Tensor
    ) -> Tensor:
        context = self.context(positions_BS, document_ids_BS)
        hidden_BSD = x
        if self.embeds:
            assert self.embedding is not None
            hidden_BSD = self.embedding(x)
        for block in self.layers.values():
            hidden_BSD = block(hidden_BSD, context)
        return hidden_BSD
