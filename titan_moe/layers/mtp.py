"""Multi-token prediction: a block that sees one more token, and predicts the one after it.

After DeepSeek-V3 (arXiv 2412.19437, section 2.2, equations 21 to 23), as its published weights have
it, which differs from the paper in two ways: the embedding comes first into the projection, and
what goes from depth to depth has been normed, the main model's by its final norm.

B batch, S sequence, D hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.model import ModelConfig
from titan_moe.layers.decoder import Context
from titan_moe.layers.linear import Linear
from titan_moe.layers.norm import RMSNorm


class PredictsAhead(nn.Module):
    """Makes a family's block a layer of multi-token prediction:

        class MtpBlock(PredictsAhead, Block): ...

    Block(cfg, layer, ...) has forward(x_BSD, context) -> x_BSD. Embedding and output are the
    model's own.
    """

    def __init__(self, cfg: ModelConfig, layer: int, *args: Any) -> None:
        super().__init__(cfg, layer, *args)
        hidden, eps = cfg.hidden_size, cfg.norm_eps
        self.embedding_norm = RMSNorm(hidden, eps=eps)
        self.hidden_norm = RMSNorm(hidden, eps=eps)
        self.project = Linear(2 * hidden, hidden, std=cfg.initializer_range)
        self.output_norm = RMSNorm(hidden, eps=eps)

    def forward(
        self, x_BSD: Tensor, context: Context, embedded_BSD: Tensor | None = None
    ) -> Tensor:
        """normed_BSD, ready for the head's output, and for the next depth.

        x_BSD: normed, of the depth before. embedded_BSD: of the token that this one adds.
        """
        assert embedded_BSD is not None, "a layer of multi-token prediction in a block's place"
        pair = [self.embedding_norm(embedded_BSD), self.hidden_norm(x_BSD)]
        x_BSD = super().forward(self.project(torch.cat(pair, dim=-1)), context)
        normed_BSD: Tensor = self.output_norm(x_BSD)
        return normed_BSD
