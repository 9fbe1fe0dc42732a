"""Tokens further ahead, for multi-token prediction: from whole rows, before they are sliced.

B rows, S sequence, M layers of multi-token prediction, K = 1 + M.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.layers.head import IGNORED_LABEL

Batch = dict[str, Tensor]


def labels_ahead(labels_BS: Tensor, depth: int) -> Tensor:
    """labels_BSK: the next token of each position, as the labels have it, and the `depth` after it.

    Each follows the one before: a position without a label has no token after it either (-100), be
    it at the end of a document, of the row, or for whatever reason it has none.
    """
    ahead = [labels_BS]
    for _ in range(depth):
        of_next_BS = F.pad(ahead[-1][:, 1:], (0, 1), value=IGNORED_LABEL)
        ahead.append(of_next_BS.masked_fill(labels_BS == IGNORED_LABEL, IGNORED_LABEL))
    return torch.stack(ahead, dim=2)


def look_ahead(batch: Batch, depth: int) -> Batch:
    """The batch with labels_BSK for labels, and `next_tokens` [B, S, M] for the layers to read.

    What layer m of M predicts is what layer m + 1 is told. depth: M; without such layers (0) the
    batch as it is.
    """
    if depth == 0:
        return batch
    labels_BSK = labels_ahead(batch["labels"], depth)
    return batch | {"labels": labels_BSK, "next_tokens": labels_BSK[:, :, :-1]}


def labels_at_each_depth(labels: Tensor) -> Tensor:
    """int64 [K], how many there are; of plain labels [B, S] too, where K is 1."""
    return (torch.atleast_3d(labels) != IGNORED_LABEL).sum(dim=(0, 1))
