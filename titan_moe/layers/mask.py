"""Who sees whom: a query sees a key of its own document that is not later than itself.

B batch, S queries, T keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Documents and order of queries and keys, each side by itself, so that sides may be slices.

    order_S, order_T: int64, index of each query and key within the whole row.
    documents_BS, documents_BT: int64; equal within a document (padding, -1, is one like any other,
        so its rows see themselves and stay finite).

    Where nothing but order matters and both sides are whole rows, `None` stands for the mask.
    """

    order_S: Tensor
    order_T: Tensor
    documents_BS: Tensor
    documents_BT: Tensor

    @classmethod
    def of_documents(cls, document_ids_BS: Tensor) -> "AttentionMask":
        """The mask of whole rows."""
        order_S = torch.arange(document_ids_BS.shape[1], device=document_ids_BS.device)
        return cls(order_S, order_S, document_ids_BS, document_ids_BS)

    def visible(self) -> Tensor:
        """visible_BST, True where the query sees the key. Quadratic: for the reference."""
        causal_ST = self.order_S[:, None] >= self.order_T
        return causal_ST & (self.documents_BS[:, :, None] == self.documents_BT[:, None, :])


def plain_causal(document_ids_BS: Tensor) -> None:
    """A model's `make_mask` where attention may cross documents. Padding must end the row."""
    return
