"""Trade compute for memory: run a block's forward again in backward, keep only its input."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from titan_moe.config.sections import ActivationCheckpoint
from titan_moe.layers.router import ROUTING_OPS
from titan_moe.passes.rerun import run_and_forget

logger = logging.getLogger(__name__)


def apply_activation_checkpoint(
    model: nn.Module, section: ActivationCheckpoint, *, splits_backward: bool = False
) -> None:
    """With mode "full", keep only the input of each of `model.layers`, in place.

    splits_backward: a pipeline's schedule takes backward in two parts, inputs and weights. Then a
        block that was run again for the first part keeps what it saved until the second.

    Routing is kept too, few bytes as it is: run again, it could send a near-tied token to another
    expert than forward did, and would count every token twice. Modules keep their names, as the
    block's `forward` is replaced and nothing is wrapped around it.
    """
    if section.mode == "none":
        return
    blocks = list(model.get_submodule("layers").children())
    for block in blocks:
        _recompute(block, splits_backward)
    logger.info(
        "activation checkpoint: %d blocks recomputed, routing kept%s",
        len(blocks),
        "; what backward saves of a micro-batch is held from its inputs' part to its weights'"
        if splits_backward
        else "",
    )


def _recompute(block: nn.Module, splits_backward: bool) -> None:
    forward = block.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if splits_backward:
            return run_and_forget(
                *(_within(context, forward, args, kwargs) for context in _keep_routing())
            )
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing in a step is random
            context_fn=_keep_routing,
            **kwargs,
        )

    block.forward = recomputed


def _within(
    context: TorchDispatchMode,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[], Any]:
    def run() -> Any:
        with context:
            return forward(*args, **kwargs)

    return run


def _keep_routing() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of a block's forward, and of each time that it is run again.

    torch's own selective checkpointing asks that both run the same ops, all of them; FSDP, which
    gathers router and experts inside the block, does not run the same ones in backward.
    """
    kept: list[Any] = []
    return _Record(kept), _Replay(kept)


class _Record(TorchDispatchMode):
    """Keep what the routing operators return."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ROUTING_OPS:
            self._kept.append(result)
        return result


class _Replay(TorchDispatchMode):
    """Give what was kept, in the same order, instead of running those operators again."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0  # a block may be recomputed more than once
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in ROUTING_OPS:
            return func(*args, **(kwargs or {}))
        self._next += 1
        return self._kept[self._next - 1]
