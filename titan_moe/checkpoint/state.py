"""What a checkpoint holds, as one flat table from name to tensor.

    model.<parameter or persistent buffer>
    optimizer.<entry>.<parameter>              e.g. optimizer.exp_avg.layers.0.norm.weight

Names are those of the plain model: wrappers (activation checkpointing, torch.compile) leave no
trace. The tensors are the live ones, so that saving reads and loading writes them in place;
DTensors stay DTensors, which is what lets any layout load what another saved. Of a weight that two
parts hold, as tied embeddings in a V-shaped pipeline, the first part's is in the table.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MODEL = "model."
OPTIMIZER = "optimizer."

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_MOMENTS: dict[type[Optimizer], tuple[str, ...]] = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq")}


def plain_name(name: str) -> str:
    """`layers.0._orig_mod.norm.weight` -> `layers.0.norm.weight`."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def model_tensors(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers of all parts on this rank, by `model.<name>`."""
    return _first_of_each(_model_entries(parts))


def optimizer_tensors(parts: Iterable[nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by `optimizer.<entry>.<parameter>`, whatever its parameter groups.

    State that the optimizer has not made yet (before its first step, or of a parameter that never
    had a gradient) is made here, as it would make it: zero moments at step 0. No step is taken.

    Raises:
        ValueError: the optimizer is of a class whose state is not known here.
    """
    return _first_of_each(_optimizer_entries(parts, optimizer))


@torch.no_grad()
def fill_copies(parts: list[nn.Module], optimizer: Optimizer | None) -> None:
    """After loading: what several parts hold gets the values of what is in the table.

    optimizer: None where weights alone were loaded.
    """
    entries = [*_model_entries(parts)]
    if optimizer is not None:
        entries += _optimizer_entries(parts, optimizer)
    loaded = _first_of_each(entries)
    for key, tensor in entries:
        if tensor is not loaded[key]:
            tensor.copy_(loaded[key])


def _first_of_each(entries: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, tensor in entries:
        tensors.setdefault(key, tensor)
    return tensors


def _model_entries(parts: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for part in parts:
        seen: set[int] = set()  # a weight that modules of one part share has one name
        for name, tensor in part.state_dict(keep_vars=True).items():
            assert isinstance(tensor, Tensor), f"{name} is not a tensor"
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield MODEL + plain_name(name), tensor


def _optimizer_entries(
    parts: Iterable[nn.Module], optimizer: Optimizer
) -> Iterator[tuple[str, Tensor]]:
    names = {
        parameter: plain_name(name) for part in parts for name, parameter in part.named_parameters()
    }
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert parameter in names, "the optimizer holds a parameter that is not the model's"
            state = optimizer.state[parameter]
            if not state:
                state.update(_fresh_state(optimizer, parameter, group))
            for entry, value in state.items():
                yield f"{OPTIMIZER}{entry}.{names[parameter]}", value


def _fresh_state(
    optimizer: Optimizer, parameter: Tensor, group: dict[str, object]
) -> dict[str, Tensor]:
    if type(optimizer) not in _MOMENTS:
        raise ValueError(f"checkpoints do not know the state of {type(optimizer).__name__}")
    on_device = group.get("fused") or group.get("capturable")
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    moments = {entry: torch.zeros_like(parameter) for entry in _MOMENTS[type(optimizer)]}
    return {"step": step, **moments}
