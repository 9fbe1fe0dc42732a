"""Multi-token prediction: a block that sees one more token, and predicts the one after it.

After DeepSeek-V3 (arXiv 2412.19437, section 2.2, equations 21 to 23), as its published weights have
it, which differs from the paper in two ways: the embedding comes first into the projection, and
what goes from depth to depth has been normed, the main model's by its final norm.

B batch, S sequence, D hidden, M layers of multi-token prediction.
"""

from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.model import ModelConfig
from titan_moe.layers.context import Context
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


def side_by_side(hidden_BSD: Tensor, embedded_BSMD: Tensor) -> tuple[Tensor, Tensor]:
    """The same two, having been one tensor in between.

    A pipeline's schedule may take backward in two parts, inputs and weights, and then takes a
    weight's gradient from where it first meets what comes from the inputs. The embedding would
    meet it in every layer of multi-token prediction, one behind the other, and a part of the graph
    would be gone through twice. So it meets it here, once, before them all.
    """
    width, shape = hidden_BSD.shape[-1], embedded_BSMD.shape
    both_BSX = torch.cat([hidden_BSD, embedded_BSMD.flatten(2)], dim=-1)
    hidden_BSD, embedded_BSX = both_BSX.split([width, both_BSX.shape[-1] - width], dim=-1)
    return hidden_BSD, embedded_BSX.unflatten(-1, shape[2:])
