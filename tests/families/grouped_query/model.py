"""Grouped-query attention (arXiv 2305.13245) with normed heads, and softmax-routed experts.

B batch, S sequence (queries), T keys, D hidden, H query heads, G key heads, N width of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from titan_moe.layers.attention import attention
from titan_moe.layers.experts import Experts
from titan_moe.layers.head import Head
from titan_moe.layers.linear import Embedding, Linear
from titan_moe.layers.mask import AttentionMask
from titan_moe.layers.moe import MoE
from titan_moe.layers.norm import RMSNorm
from titan_moe.layers.rope import Rope, Rotation
from titan_moe.layers.router import Router

from .config import GroupedQueryConfig


@dataclass(frozen=True)
class Context:
    """What all blocks of one forward share. Not a tensor, so that no wrapper casts its fp32."""

    rotation: Rotation
    mask: AttentionMask | None
    valid_BS: Tensor


def keep_local(k_BSGN: Tensor, v_BSGN: Tensor) -> tuple[Tensor, Tensor]:
    """`gather_kv` where one process holds whole sequences."""
    return k_BSGN, v_BSGN


class GroupedQueryAttention(nn.Module):
    """Queries and keys are normed head by head, then turned.

    Slots: backend (see `attention`); gather_kv(k_BSGN, v_BSGN) -> the same over T keys.
    """

    def __init__(self, cfg: GroupedQueryConfig, rope: Rope) -> None:
        super().__init__()
        self.backend = "auto"
        self.gather_kv: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = keep_local
        self.head_dim, self.scale = cfg.head_dim, rope.attention_scale(cfg.head_dim)
        queries, keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.q = Linear(cfg.hidden_size, queries, std=cfg.initializer_range)
        self.k = Linear(cfg.hidden_size, keys, std=cfg.initializer_range)
        self.v = Linear(cfg.hidden_size, keys, std=cfg.initializer_range)
        self.q_norm = RMSNorm(cfg.head_dim, eps=cfg.norm_eps)
        self.k_norm = RMSNorm(cfg.head_dim, eps=cfg.norm_eps)
        self.out = Linear(queries, cfg.hidden_size, std=cfg.initializer_range)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        # As many heads as the weights give: tensor parallelism leaves a rank some of them.
        q_BSHN, k_BSGN, v_BSGN = (
            project(x_BSD).unflatten(-1, (-1, self.head_dim))
            for project in (self.q, self.k, self.v)
        )
        q_BSHN = context.rotation(self.q_norm(q_BSHN))
        k_BTGN, v_BTGN = self.gather_kv(context.rotation(self.k_norm(k_BSGN)), v_BSGN)
        out_BSHN = attention(
            q_BSHN, k_BTGN, v_BTGN, scale=self.scale, mask=context.mask, backend=self.backend
        )
        return self.out(out_BSHN.flatten(2))


class Block(nn.Module):
    """Pre-norm: attention, then experts."""

    def __init__(self, cfg: GroupedQueryConfig, rope: Rope) -> None:
        super().__init__()
        hidden, std = cfg.hidden_size, cfg.initializer_range
        self.attention_norm = RMSNorm(hidden, eps=cfg.norm_eps)
        self.attention = GroupedQueryAttention(cfg, rope)
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
        self.moe = MoE(router, experts, None, balance_loss_weight=cfg.balance_loss_weight)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), context)
        return x_BSD + self.moe(self.moe_norm(x_BSD), context.valid_BS)


class Model(nn.Module):
    """Blocks `layers` of the model; with the embedding before them, the head after, or neither.

    The head's output is the embedding's weight, so a part with a head holds it too, under the one
    name `embedding.weight`. Slot: make_mask(document_ids_BS) -> AttentionMask | None.
    """

    def __init__(
        self, cfg: GroupedQueryConfig, *, layers: range, has_embedding: bool, has_head: bool
    ) -> None:
        super().__init__()
        std = cfg.initializer_range
        self.rope = Rope(cfg.head_dim, cfg.rope_theta, cfg.max_seq_len, cfg.rope_scaling)
        self.make_mask: Callable[[Tensor], AttentionMask | None] = AttentionMask.of_documents
        self.has_embedding = has_embedding
        self.embedding: Embedding | None = None
        self.head: Head | None = None
        if has_embedding or has_head:
            self.embedding = Embedding(cfg.vocab_size, cfg.hidden_size, std=std)
        self.layers = nn.ModuleDict({str(layer): Block(cfg, self.rope) for layer in layers})
        if has_head:
            assert self.embedding is not None
            self.head = Head(cfg.hidden_size, cfg.vocab_size, norm_eps=cfg.norm_eps, std=std)
            self.head.output.weight = self.embedding.weight

    def forward(
        self, x: Tensor, *, positions_BS: Tensor, document_ids_BS: Tensor, tokens_BS: Tensor
    ) -> Tensor:
        """hidden_BSD, before the final norm (`head.loss` and `head.logits` begin with it).

        x: tokens_BS where this part embeds them, else the previous part's hidden_BSD.
        document_ids_BS: 0, 1, 2 ... within a row; -1 marks padding. tokens_BS: for every part.
        """
        context = Context(
            rotation=self.rope(positions_BS),
            mask=self.make_mask(document_ids_BS),
            valid_BS=document_ids_BS >= 0,
        )
        hidden_BSD = x
        if self.has_embedding:
            assert self.embedding is not None
            hidden_BSD = self.embedding(x)
        for block in self.layers.values():
            hidden_BSD = block(hidden_BSD, context)
        return hidden_BSD
