"""FLOPs counted from what really runs, against those that flops.py works out from the sizes.

S tokens of one sequence, R rows of one matmul, E experts.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.check.report import WrongError
from titan_moe.check.subject import Subject
from titan_moe.check.tolerances import FLOPS_RTOL
from titan_moe.flops import model_flops_per_token
from titan_moe.layers.attention import attention
from titan_moe.parallel.ahead import look_ahead
from titan_moe.parallel.whole import keywords_of

# A multiply and an add, and as much again twice in backward.
FLOPS_PER_WEIGHT = 6
KINDS = (  # where in a block a matmul is -> its kind in ModelFlops
    ("attention.", "attention_projections"),
    ("moe.experts", "experts"),
    ("moe.shared.", "shared_experts"),
    ("mlp.", "dense_mlp"),
)
WHERE = {
    "attention_projections": "attention_shape(...).projection_params",
    "attention_scores": "attention_shape(...): num_heads, qk_head_dim, v_head_dim, window",
}


def flops_agree(subject: Subject) -> str:
    """Every kind of matmul costs what flops.py says, per token and step."""
    cfg, seq_len = subject.model_config, subject.config.training.seq_len
    said = asdict(model_flops_per_token(cfg, seq_len))
    found = counted_flops(subject)
    for kind in said.keys() | found.keys():
        theirs, ours = said.get(kind, 0.0), found[kind]
        if abs(theirs - ours) > FLOPS_RTOL * max(theirs, ours):
            where = WHERE.get(kind, "the sizes of [model]")
            raise WrongError(
                f"{kind}: the model's matmuls cost {ours:,.0f} FLOPs per token and step, its "
                f"config says {theirs:,.0f}",
                f"{subject.file('config.py')}: {where}; or {subject.file('model.py')}",
            )
    model = subject.build("meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{parameters:,} parameters; {sum(said.values()) / 1e6:.4g} MFLOP per token and step"


@torch.no_grad()
def counted_flops(subject: Subject) -> dict[str, float]:
    """By kind, per token of one sequence, from the rows that reach each weight."""
    model = subject.stirred().train()
    batch = {key: value[:1] for key, value in subject.plain_batch.items()}
    batch = look_ahead(batch, subject.model_config.mtp_depth())
    tokens = batch["tokens"].numel()
    found: dict[str, float] = defaultdict(float)
    layers = subject.model_config.num_layers

    def note(kind: str, weights: int, rows: int) -> None:
        found[kind] += FLOPS_PER_WEIGHT * weights * rows / tokens

    def linear(name: str) -> Any:
        def hook(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
            rows, kind = args[0].numel() // module.in_features, kind_of(name, layers)
            if kind == "logits":  # one use for all depths, the first of which is the model's own
                note("mtp", module.weight.numel(), rows - tokens)
                rows = tokens
            note(kind, module.weight.numel(), rows)

        return hook

    def stacked(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            matrices = [p for p in module.parameters(recurse=False) if p.ndim == 3]
            note(kind_of(name, layers), sum(p[0].numel() for p in matrices), len(args[0]))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".router" not in name:
            module.register_forward_pre_hook(linear(name))
        elif name.endswith("moe.experts"):
            module.register_forward_pre_hook(stacked(name))
    layer = _CurrentLayer(model)

    def scores(flops: float) -> None:
        found["mtp" if layer.number >= layers else "attention_scores"] += flops / tokens

    with watched_attention(scores):
        hidden = model(batch["tokens"], **keywords_of(batch))
        model.head.loss(hidden, batch["labels"])
    return found


def kind_of(name: str, layers: int) -> str:
    """The field of ModelFlops that a module belongs to."""
    if name.startswith("head."):
        return "logits"
    match = re.match(r"layers\.(\d+)\.(.*)", name)
    if match and int(match[1]) >= layers:
        return "mtp"
    inside = match[2] if match else name
    return next((kind for start, kind in KINDS if inside.startswith(start)), inside)


class _CurrentLayer:
    """Which block is running."""

    def __init__(self, model: Any) -> None:
        self.number = 0
        for key, block in model.layers.items():
            block.register_forward_pre_hook(lambda *_, number=int(key): self._enter(number))

    def _enter(self, number: int) -> None:
        self.number = number


@contextmanager
def watched_attention(note: Any) -> Iterator[None]:
    """Tell `note` the FLOPs of every call of `attention`, wherever it was imported by name."""

    def watching(q_BSHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, **keys: Any) -> Tensor:
        rows, seq_len, heads, width = q_BSHD.shape
        mean_keys = mean_keys_seen(seq_len, keys.get("window"))
        per_key = heads * (width + v_BTGV.shape[-1])
        note(FLOPS_PER_WEIGHT * rows * seq_len * per_key * mean_keys)
        return attention(q_BSHD, k_BTGD, v_BTGV, **keys)

    holders = [
        module
        for module in list(sys.modules.values())
        if getattr(module, "__dict__", {}).get("attention") is attention
        and module.__name__ not in (attention.__module__, __name__)
    ]
    for module in holders:
        setattr(module, "attention", watching)  # noqa: B010
    try:
        yield
    finally:
        for module in holders:
            setattr(module, "attention", attention)  # noqa: B010


def mean_keys_seen(seq_len: int, window: int | None) -> float:
    """By a query at any real position up to seq_len: the area under min(position, window)."""
    most = seq_len if window is None else window
    seen = torch.arange(seq_len + 1, dtype=torch.float64).clamp(max=most)
    return float(torch.trapezoid(seen)) / seq_len
