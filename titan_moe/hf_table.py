"""What a family's checkpoints look like on the Hugging Face side: one table, read both ways.

A recipe's `hf.py` holds a `HuggingFace`; import and export, which read it, are in `titan_moe/hf`.
Torch-free.

Names are patterns. `{layer}` stands for a block's number, those of layers of multi-token prediction
(counted on after the blocks) among them; `{mtp}` for one of these alone; `{beyond}` for any number
after all of them; `{expert}` for an expert's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_moe.config.model import ModelConfig


@dataclass(frozen=True)
class Weight:
    """One of our tensors, and where its numbers are on their side.

    theirs: with `{expert}`, one tensor for each index of our first dimension; else one tensor.
    transposed: the last two dimensions of theirs are ours the other way round.
    every: (first, step): along the last dimension (after transposing) ours are their entries
        number first, first + step, ...; absent: all.
    float32: it stays so on export, whatever the others are cast to.
    """

    ours: str
    theirs: str
    transposed: bool = False
    every: tuple[int, int] | None = None
    float32: bool = False


@dataclass(frozen=True)
class Copy:
    """Their second name for one of our tensors: written on export, not read on import."""

    ours: str
    theirs: str


@dataclass(frozen=True)
class LeftOut:
    """Theirs that a recipe has no use for: not read on import, not written on export.

    theirs may end in `*`. why: for the log.
    """

    theirs: str
    why: str


@dataclass(frozen=True)
class OursOnly:
    """Ours that has no place on their side: on import it keeps its initial value.

    must_be_zero: export refuses values that would be lost with it.
    """

    ours: str
    must_be_zero: bool = False


Row = Weight | Copy | LeftOut | OursOnly


def nothing(cfg: ModelConfig) -> dict[str, Any]:
    """No derived keys."""
    return {}


@dataclass(frozen=True)
class HuggingFace:
    """`HF` of a recipe's hf.py.

    architecture, model_type: as config.json has them.
    weights: one row for every tensor of either side; a name that fits none is an error.
    keys: from our key of `[model]` to theirs of config.json. `rope_theta` and `rope_scaling` need
        no entry.
    only: keys of ours that config.json cannot tell, or that their code does not heed, with the
        value that is computed there. Another one is neither exported nor imported.
    nulls: our value of a key that is null on their side, e.g. {"q_lora_rank": 0}. Where ours is
        absent, theirs is null in any case.
    also: other names that their keys come by, e.g. {"num_local_experts": "num_experts"}.
    defaults: keys of theirs that config.json may lack, with the value that they then have there.
        `rope_scaling` among them, as it would be written: null is taken for it as well. Without an
        entry a key of `keys` or of `derived` that is absent is an error, and one of `fixed` has
        its value.
    may_have_fewer: keys of which a model may have less than the checkpoint that it starts from,
        as layers of multi-token prediction, whose tensors a LeftOut row then covers.
    fixed: keys of theirs with the only value that the recipe computes. Written on export; on import
        another value is an error.
    derived: the same for what follows from the sizes. Raises ValueError for sizes that their code
        cannot compute.
    derived_from: keys of ours that it tells, and `keys` does not.
    follows: keys of `derived` that are the same there where config.json lacks them, or has null.

    Every key of a family's `[model]` but those of training is in `keys`, `only` or `derived_from`.
    """

    architecture: str
    model_type: str
    weights: tuple[Row, ...]
    keys: Mapping[str, str]
    only: Mapping[str, Any] = field(default_factory=dict)
    nulls: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    may_have_fewer: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Any], dict[str, Any]] = nothing
    derived_from: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
