"""What the blocks of a decoder are told besides their input.

B batch, S sequence.
"""

from dataclasses import dataclass

from torch import Tensor

from titan_moe.layers.mask import AttentionMask
from titan_moe.layers.rope import Rotation


@dataclass(frozen=True)
class Context:
    """What all blocks of one forward share. Not a tensor, so that no wrapper casts its fp32."""

    rotation: Rotation
    mask: AttentionMask | None
    valid_BS: Tensor
