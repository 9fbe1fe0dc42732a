"""Mixtral's architecture (arXiv 2401.04088): windowed attention, softmax over the chosen experts.

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

from .config import MixtralConfig


class Block(nn.Module):
    """Pre-norm: attention, then experts."""

    def __init__(self, cfg: MixtralConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(cfg.hidden_size, eps=cfg.norm_eps)
        self.attention = GroupedQueryAttention(
            cfg.hidden_size,
            cfg.num_heads,
            cfg.num_kv_heads,
            cfg.head_dim,
            std=cfg.initializer_range,
            window=cfg.sliding_window,
        )
        self.mlp_norm = RMSNorm(cfg.hidden_size, eps=cfg.norm_eps)
        self.moe = build_moe(cfg, layer)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), context)
        return x_BSD + self.moe(self.mlp_norm(x_BSD), context.valid_BS)


def build_moe(cfg: MixtralConfig, layer: int) -> MoE:
    """The experts of block `layer`, with that layer's balance settings."""
    hidden, std = cfg.hidden_size, cfg.initializer_range
    router = Router(
        hidden,
        cfg.num_experts,
        cfg.top_k,
        score_function="softmax",
        normalize_weights=True,  # the same as a softmax over the chosen logits alone
        route_scale=1.0,
        std=std,
    )
    experts = Experts(cfg.num_experts, hidden, cfg.moe_intermediate_size, std=std)
    return MoE(router, experts, None, balance=cfg.balance(layer))


class Model(Decoder):
    """Mixtral, or the part of it with blocks `layers`. See `Decoder`."""

    def __init__(
        self, cfg: MixtralConfig, *, layers: range, has_embedding: bool, has_head: bool
    ) -> None:
        rope = Rope(
            cfg.head_dim, cfg.rope_theta, cfg.max_seq_len, cfg.rope_scaling, layout="halves"
        )
        super().__init__(
            cfg,
            layers=layers,
            has_embedding=has_embedding,
            has_head=has_head,
            rope=rope,
            block=lambda layer: Block(cfg, layer),
        )
