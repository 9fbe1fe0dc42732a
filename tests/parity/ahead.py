"""Multi-token prediction by the book: token after token, layer after layer.

DeepSeek-V3 (arXiv 2412.19437), section 2.2, in the order of the published weights.

B rows, S sequence, D hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recipes.deepseek_v3.model import Block


@dataclass(frozen=True)
class Chain:
    """Of one depth: the token that each position adds to its input, and the one that it predicts.

    -100: there is none. known_BS: where there is one to add.
    """

    tokens_BS: Tensor
    labels_BS: Tensor

    @property
    def known_BS(self) -> Tensor:  # noqa: N802 (a shape)
        return self.tokens_BS != -100


def chains(batch: dict[str, Tensor], depth: int) -> list[Chain]:
    """From label to label, as far as they go without a break."""
    labels = batch["labels"].tolist()

    def label(row: int, place: int, ahead: int) -> int:
        """The token `ahead` + 1 after `place`."""
        way = labels[row][place : place + ahead + 1]
        return way[-1] if len(way) == ahead + 1 and -100 not in way else -100

    rows, tokens = batch["labels"].shape
    of_depths = [
        torch.tensor([[label(b, s, ahead) for s in range(tokens)] for b in range(rows)])
        for ahead in range(depth + 1)
    ]
    return [Chain(*pair) for pair in pairwise(of_depths)]


def hidden_ahead(
    model: Any, hidden_BSD: Tensor, batch: dict[str, Tensor], ahead: list[Chain]
) -> Iterator[Tensor]:
    """normed_BSD of each depth, for the output. hidden_BSD: before the model's final norm."""
    context = model.context(batch["positions"], batch["document_ids"])
    before_BSD = model.head.norm(hidden_BSD)
    for depth, chain in enumerate(ahead):
        layer = model.layers[str(len(model.layers) - len(ahead) + depth)]
        table_VD = model.embedding.weight
        embedded_BSD = table_VD[chain.tokens_BS.where(chain.known_BS, 0)]
        inputs = [layer.embedding_norm(embedded_BSD), layer.hidden_norm(before_BSD)]
        x_BSD = torch.cat(inputs, dim=-1) @ layer.project.weight.T
        before_BSD = layer.output_norm(Block.forward(layer, x_BSD, context))
        yield before_BSD
