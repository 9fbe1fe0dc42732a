"""What a checkpoint holds, as one flat table from name to tensor.

    model.<parameter or persistent buffer>
    optimizer.<entry>.<parameter>              e.g. optimizer.exp_avg.layers.0.norm.weight

Names are those of the plain model: wrappers (activation checkpointing, torch.compile) leave no
trace. The tensors are the live ones, so that saving reads and loading writes them in place;
DTensors stay DTensors, which is what lets any layout load what another saved.
"""

from collections.abc import Iterable

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
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            key = MODEL + plain_name(name)
            assert isinstance(tensor, Tensor), f"{name} is not a tensor"
            assert key not in tensors, f"two parts of the model hold {key}"
            tensors[key] = tensor
    return tensors


def optimizer_tensors(parts: Iterable[nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by `optimizer.<entry>.<parameter>`, whatever its parameter groups.

    State that the optimizer has not made yet (before its first step, or of a parameter that never
    had a gradient) is made here, as it would make it: zero moments at step 0. No step is taken.

    Raises:
        ValueError: the optimizer is of a class whose state is not known here.
    """
    names = {
        parameter: plain_name(name) for part in parts for name, parameter in part.named_parameters()
    }
    tensors: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert parameter in names, "the optimizer holds a parameter that is not the model's"
            state = optimizer.state[parameter]
            if not state:
                state.update(_fresh_state(optimizer, parameter, group))
            for entry, value in state.items():
                tensors[f"{OPTIMIZER}{entry}.{names[parameter]}"] = value
    return tensors


def _fresh_state(
    optimizer: Optimizer, parameter: Tensor, group: dict[str, object]
) -> dict[str, Tensor]:
    if type(optimizer) not in _MOMENTS:
        raise ValueError(f"checkpoints do not know the state of {type(optimizer).__name__}")
    on_device = group.get("fused") or group.get("capturable")
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    moments = {entry: torch.zeros_like(parameter) for entry in _MOMENTS[type(optimizer)]}
    return {"step": step, **moments}
