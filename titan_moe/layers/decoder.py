"""A decoder, or the part of one that a pipeline stage holds: embedding, blocks, head.

B batch, S sequence, D hidden, M layers of multi-token prediction.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from titan_moe.config.model import ModelConfig
from titan_moe.layers.context import Context
from titan_moe.layers.head import Head
from titan_moe.layers.linear import Embedding
from titan_moe.layers.mask import AttentionMask
from titan_moe.layers.mtp import side_by_side
from titan_moe.layers.rope import Rope


class Decoder(nn.Module):
    """Blocks `layers` of a model; with the embedding before them, the head after, or neither.

    A family's Model is this, told what its blocks are: block(layer) makes block number `layer`,
    whose forward(x_BSD, context) -> x_BSD. Blocks are in a dict by their number, so that a name is
    the same whatever part of the model a process holds.

    Layers of multi-token prediction (see layers/mtp.py) are numbered on after the blocks. The part
    with the head has them, and for them the embedding too, under its one name; `embeds` tells the
    part that begins with it.

    Slot: make_mask(document_ids_BS) -> AttentionMask | None.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        layers: range,
        has_embedding: bool,
        has_head: bool,
        rope: Rope,
        block: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        std = cfg.initializer_range
        self.rope = rope
        self.make_mask: Callable[[Tensor], AttentionMask | None] = AttentionMask.of_documents
        depth = cfg.mtp_depth() if has_head else 0
        ahead = range(cfg.num_layers, cfg.num_layers + depth)
        self.embeds, self.ahead = has_embedding, [str(layer) for layer in ahead]
        self.embedding = (
            Embedding(cfg.vocab_size, cfg.hidden_size, std=std) if has_embedding or depth else None
        )
        self.layers = nn.ModuleDict({str(layer): block(layer) for layer in (*layers, *ahead)})
        self.head = (
            Head(
                cfg.hidden_size,
                cfg.vocab_size,
                norm_eps=cfg.norm_eps,
                std=std,
                mtp_depth=depth,
            )
            if has_head
            else None
        )

    def forward(
        self,
        x: Tensor,
        *,
        positions_BS: Tensor,
        document_ids_BS: Tensor,
        tokens_BS: Tensor,
        next_tokens_BSM: Tensor | None = None,
    ) -> Tensor:
        """hidden_BSD, before the final norm (`head.loss` and `head.logits` begin with it).

        x: tokens_BS in the part that begins with the embedding, else the previous one's hidden_BSD.
        document_ids_BS: 0, 1, 2 ... within a row; -1 marks padding. tokens_BS: for every part.
        next_tokens_BSM: to train multi-token prediction, the M tokens after each; -100 where there
            is none to be known. Then the part with the head returns hidden states of all depths
            side by side, [B, S, (1 + M)·D], normed already.
        Raises ValueError or RuntimeError for positions that rotary tables do not cover (see Rope).
        """
        context = self.context(positions_BS, document_ids_BS)
        hidden_BSD = x
        if self.embeds:
            assert self.embedding is not None
            hidden_BSD = self.embedding(x)
        for layer, block in self.layers.items():
            if layer not in self.ahead:
                hidden_BSD = block(hidden_BSD, context)
        if self.ahead and next_tokens_BSM is not None:
            return torch.cat(list(self._depths(hidden_BSD, context, next_tokens_BSM)), dim=-1)
        return hidden_BSD

    def _depths(
        self, hidden_BSD: Tensor, context: Context, next_tokens_BSM: Tensor
    ) -> Iterator[Tensor]:
        """normed_BSD of the model, then of each layer of multi-token prediction in turn."""
        assert self.embedding is not None
        assert self.head is not None
        hidden_BSD, embedded_BSMD = side_by_side(
            hidden_BSD, self.embedding(next_tokens_BSM.clamp(min=0))
        )
        normed_BSD = self.head.norm(hidden_BSD)
        yield normed_BSD
        for depth, layer in enumerate(self.ahead):
            # A position without that token flows like padding, and like it leaves no trace.
            known_BS = context.valid_BS & (next_tokens_BSM[:, :, depth] >= 0)
            normed_BSD = self.layers[layer](
                normed_BSD, replace(context, valid_BS=known_BS), embedded_BSMD[:, :, depth]
            )
            yield normed_BSD

    def context(self, positions_BS: Tensor, document_ids_BS: Tensor) -> Context:
        return Context(
            rotation=self.rope(positions_BS),
            mask=self.make_mask(document_ids_BS),
            valid_BS=document_ids_BS >= 0,
        )
