"""A decoder, or the part of one that a pipeline stage holds: embedding, blocks, head.

B batch, S sequence, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from titan_moe.config.model import ModelConfig
from titan_moe.layers.head import Head
from titan_moe.layers.linear import Embedding
from titan_moe.layers.mask import AttentionMask
from titan_moe.layers.rope import Rope, Rotation


@dataclass(frozen=True)
class Context:
    """What all blocks of one forward share. Not a tensor, so that no wrapper casts its fp32."""

    rotation: Rotation
    mask: AttentionMask | None
    valid_BS: Tensor


class Decoder(nn.Module):
    """Blocks `layers` of a model; with the embedding before them, the head after, or neither.

    A family's Model is this, told what its blocks are: block(layer) makes block number `layer`,
    whose forward(x_BSD, context) -> x_BSD. Blocks are in a dict by their number, so that a name is
    the same whatever part of the model a process holds.

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
        self.embedding = (
            Embedding(cfg.vocab_size, cfg.hidden_size, std=std) if has_embedding else None
        )
        self.layers = nn.ModuleDict({str(layer): block(layer) for layer in layers})
        self.head = (
            Head(cfg.hidden_size, cfg.vocab_size, norm_eps=cfg.norm_eps, std=std)
            if has_head
            else None
        )

    def forward(
        self, x: Tensor, *, positions_BS: Tensor, document_ids_BS: Tensor, tokens_BS: Tensor
    ) -> Tensor:
        """hidden_BSD, before the final norm (`head.loss` and `head.logits` begin with it).

        x: tokens_BS where this part has the embedding, else the previous part's hidden_BSD.
        document_ids_BS: 0, 1, 2 ... within a row; -1 marks padding. tokens_BS: for every part.
        Raises ValueError or RuntimeError for positions that rotary tables do not cover (see Rope).
        """
        context = self.context(positions_BS, document_ids_BS)
        hidden_BSD = x if self.embedding is None else self.embedding(x)
        for block in self.layers.values():
            hidden_BSD = block(hidden_BSD, context)
        return hidden_BSD

    def context(self, positions_BS: Tensor, document_ids_BS: Tensor) -> Context:
        return Context(
            rotation=self.rope(positions_BS),
            mask=self.make_mask(document_ids_BS),
            valid_BS=document_ids_BS >= 0,
        )
