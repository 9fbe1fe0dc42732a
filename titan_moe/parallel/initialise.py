"""From a model on meta to one with values: materialise its memory, then fill it, slice by slice.

A value depends on the seed, its parameter's full name and its global index alone, never on how
many processes hold the model or on which of them asks. Nothing is communicated.
"""

import logging
import math
from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_moe.config.words import counted
from titan_moe.layers.init import Computed, Constant, Init, Normal
from titan_moe.parallel.counter_normal import Stream

logger = logging.getLogger(__name__)

# Numbers are made in pieces of this many, which bounds the fp64 temporaries to some 100 MB.
CHUNK_ELEMENTS = 1 << 20

# Modules that wrap another put such a part into its name; the values must not change with it.
WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def materialise(model: nn.Module, device: torch.device, *, poison: bool = False) -> None:
    """Give parameters and buffers memory on `device`, in place. What is in it means nothing yet.

    poison: fill floats with NaN and integers with their smallest value, so that whatever is
        not initialised afterwards shows.
    """
    model.to_empty(device=device)
    if not poison:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        local = _local(tensor)
        if local.is_floating_point():
            local.fill_(math.nan)
        elif local.dtype is not torch.bool:
            local.fill_(torch.iinfo(local.dtype).min)


@torch.no_grad()
def initialise(model: nn.Module, seed: int, loaded: Container[str] = ()) -> None:
    """Fill every parameter and buffer as its module's `inits` says, in place.

    Of a DTensor only this rank's slice is computed. A tensor that two modules share is filled once,
    by its first name.

    loaded: names of tensors that are left as they are, as the caller reads them from somewhere.

    Raises:
        ValueError: a parameter or buffer without an entry in its module's `inits`, an entry without
            its tensor, or a computed value of another shape; the message names it.
    """
    filled: set[int] = set()
    for name, tensor, init in _inits_of(model):
        if id(tensor) not in filled and name not in loaded:
            filled.add(id(tensor))
            _fill(tensor, init, Stream.of(seed, name), name)
    logger.info("initialise: %s with seed %d", counted(len(filled), "tensor"), seed)


def unwrapped(name: str) -> str:
    """A parameter's name without the parts that wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def _inits_of(model: nn.Module) -> Iterator[tuple[str, Tensor, Init]]:
    for prefix, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        tensors = {name: tensor for name, tensor in own.items() if tensor is not None}
        inits = getattr(module, "inits", {})
        place = f"{prefix or 'the model'} ({type(module).__name__})"
        if missing := tensors.keys() - inits.keys():
            raise ValueError(f"{place}: no entry in .inits for {', '.join(sorted(missing))}")
        if stale := inits.keys() - own.keys():
            raise ValueError(
                f"{place}: .inits names {', '.join(sorted(stale))}, which is not there"
            )
        for name, tensor in tensors.items():
            yield unwrapped(f"{prefix}.{name}" if prefix else name), tensor, inits[name]


def _fill(tensor: Tensor, init: Init, stream: Stream, name: str) -> None:
    local = _local(tensor)
    if isinstance(init, Constant):
        local.fill_(init.value)
    elif isinstance(init, Computed):
        with torch.device("cpu"):  # so that no device's own sin or exp decides
            value = init.fn()
        if value.shape != tensor.shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, its .inits computes {tuple(value.shape)}"
            )
        for dim, index in enumerate(global_indices(tensor)):
            value = value.index_select(dim, index)
        local.copy_(value)
    else:
        assert isinstance(init, Normal)
        assert local.is_contiguous(), f"{name}: strides {local.stride()} of {tuple(local.shape)}"
        flat = local.view(-1)
        for begin in range(0, flat.numel(), CHUNK_ELEMENTS):
            piece = flat[begin : begin + CHUNK_ELEMENTS]
            index = torch.arange(begin, begin + piece.numel(), device=flat.device)
            piece.copy_(stream.normal(_to_global(tensor, local, index)) * init.std)


def _to_global(tensor: Tensor, local: Tensor, index_N: Tensor) -> Tensor:
    """Row-major positions in the local slice -> row-major positions in the whole tensor."""
    if local.shape == tensor.shape:
        return index_N
    global_N = torch.zeros_like(index_N)
    stride = 1
    dims = zip(local.shape, tensor.shape, global_indices(tensor), strict=True)
    for local_size, global_size, globals_of_dim in reversed(list(dims)):
        coordinate_N = globals_of_dim.to(index_N.device)[index_N % local_size]
        global_N += coordinate_N * stride
        index_N = index_N // local_size
        stride *= global_size
    return global_N


def global_indices(tensor: Tensor) -> list[Tensor]:
    """For each dimension, the global indices that this rank's slice holds, on the CPU.

    FSDP over another sharding of the same dimension says so by a strided placement: each of the
    `split_factor` blocks that the inner mesh dimension will cut is cut first.
    """
    indices = [torch.arange(size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return indices
    for mesh_dim, placement in enumerate(tensor.placements):
        ranks = tensor.device_mesh.size(mesh_dim)
        rank = tensor.device_mesh.get_local_rank(mesh_dim)
        if isinstance(placement, _StridedShard):
            blocks = _split(indices[placement.dim], int(placement.split_factor))
            indices[placement.dim] = torch.cat([_split(block, ranks)[rank] for block in blocks])
        elif isinstance(placement, Shard):
            indices[placement.dim] = _split(indices[placement.dim], ranks)[rank]
        else:
            assert isinstance(placement, Replicate), f"{placement} has no values to initialise"
    held, local = tuple(map(len, indices)), tuple(tensor.to_local().shape)
    assert held == local, f"{tensor.placements} should hold {held} here, not {local}"
    return indices


def _split(index: Tensor, parts: int) -> list[Tensor]:
    """As DTensor splits: pieces of the rounded-up size, the last ones smaller or empty."""
    size = -(-len(index) // parts)
    return [index[part * size : (part + 1) * size] for part in range(parts)]


def _local(tensor: Tensor) -> Tensor:
    """This rank's slice, sharing memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
