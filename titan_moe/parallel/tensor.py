"""Tensor parallelism: heads, inner widths and the vocabulary are split over neighbouring ranks.

The residual stream between split layers is each rank's own tokens (sequence parallel), or whole on
every rank. Where whole sequences come into a split layer they are gathered, and its ranks' sums are
scattered again; without sequence parallelism the sums are formed on every rank (arXiv 1909.08053,
2205.05198). Routed experts see tokens split over tp either way.

B batch, S tokens of the ranks together, D hidden, V vocabulary, v this rank's part of it.
"""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_moe.config.sections import Parallelism
from titan_moe.layers.experts import Experts
from titan_moe.layers.head import Head, cross_entropy
from titan_moe.layers.linear import Embedding, Linear
from titan_moe.layers.moe import MoE
from titan_moe.layers.norm import RMSNorm
from titan_moe.mesh import Meshes
from titan_moe.parallel.collectives import (
    all_gather,
    all_reduce,
    all_reduce_back,
    all_reduce_both_ways,
    join_slices,
    own_slice,
    reduce_scatter,
    slice_of,
)
from titan_moe.parallel.local import Splitter
from titan_moe.parallel.vocabulary import embed_slice, sliced_cross_entropy
from titan_moe.recipe import Sharding, fits

logger = logging.getLogger(__name__)

SEQUENCE = 1  # the dimension of [B, S, D] along which tokens are split


@dataclass(frozen=True)
class Stream:
    """What runs between split layers: each rank's own tokens, or (split = False) all of them."""

    group: ProcessGroup
    split: bool

    def enter(self, x: Tensor) -> Tensor:
        """Into a split layer, where every rank needs all tokens and gradients are shares."""
        if self.split:
            return all_gather(x, SEQUENCE, self.group)
        return all_reduce_back(x, self.group)

    def leave(self, share: Tensor) -> Tensor:
        """Out of a split layer, where each rank has a share of the sum."""
        if self.split:
            return reduce_scatter(share, SEQUENCE, self.group)
        return all_reduce(share, self.group)


def apply_tensor_parallel(
    model: nn.Module, meshes: Meshes, sharding: Sharding, section: Parallelism
) -> None:
    """Split the weights that `sharding` names, embedding and head, in place, on meta.

    Raises:
        ValueError: a width that the ranks do not divide; nothing to split; a split layer into
            which no tokens are gathered.
    """
    group, splitter = meshes.tensor.get_group(), Splitter(meshes.tensor)
    residual, own_tokens = Stream(group, section.sequence_parallel), Stream(group, split=True)
    names = dict(model.named_modules())
    moes = [name for name, module in names.items() if isinstance(module, MoE)]
    rowwise = [name for name in names if fits(name, sharding.rowwise)]
    regions = {name.rpartition(".")[0] for name in rowwise}
    outside = (*sharding.gather_outputs, *sharding.residual)
    dims = dict.fromkeys(rowwise, 1)
    dims |= {name: 0 for name in names if fits(name, sharding.colwise)}
    dims |= {name: 0 for name, module in names.items() if isinstance(module, Embedding)}
    dims |= {f"{name}.output": 0 for name, module in names.items() if isinstance(module, Head)}
    _check(names, rowwise, sharding)

    for name, module in names.items():
        # Where every rank has all tokens, but some heads or columns: gradients are shares.
        inside = any(_is_in(name, region) for region in regions) and not fits(name, outside)
        by_token = any(_is_in(name, moe) for moe in moes)
        stream = own_tokens if by_token else residual
        if name in dims:
            _split(splitter, module, name, dims[name], stream)
        elif not isinstance(module, Experts):
            for parameter in _own(module):
                splitter.replicate(module, parameter, partial=inside or stream.split)
        if fits(name, sharding.gather_inputs):
            module.register_forward_pre_hook(_gather_input(stream))
        if fits(name, sharding.gather_outputs):
            module.register_forward_hook(_gather_output(stream))
        if name in rowwise:
            _sum_output(module, stream)
        if isinstance(module, MoE):
            _take_own_tokens(module, residual)
        elif isinstance(module, Embedding):
            _embed(module, residual)
        elif isinstance(module, Head):
            _score(module, residual, section.disable_loss_parallel)
    logger.info(
        "tensor parallel: %d attentions and MLPs, %d weights over %d ranks, sequence parallel %s",
        len(regions),
        len(dims),
        meshes.layout.tp,
        "on" if section.sequence_parallel else "off",
    )


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]


def _check(names: dict[str, nn.Module], rowwise: list[str], sharding: Sharding) -> None:
    """That something is split, and that no split layer was forgotten to be given all tokens."""
    if not rowwise:
        raise ValueError("tensor parallel: sharding.rowwise names nothing in the model")
    gathers = (*sharding.gather_inputs, *sharding.gather_outputs)
    gathering = [name for name in names if fits(name, gathers)]
    for name in rowwise:
        parent = name.rpartition(".")[0]
        if not any(_is_in(gather, parent) or _is_in(parent, gather) for gather in gathering):
            raise ValueError(
                f"tensor parallel: {parent} is split, but sharding.gather_inputs and "
                f".gather_outputs name nothing in it: its ranks would not see each other's tokens"
            )


def _is_in(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def _split(splitter: Splitter, module: nn.Module, name: str, dim: int, stream: Stream) -> None:
    """Along dim; a bias of what is split by inputs stays whole, as it is added after the sum."""
    for parameter in _own(module):
        try:
            if module.get_parameter(parameter).ndim > dim:
                splitter.split(module, parameter, dim)
            else:
                splitter.replicate(module, parameter, partial=stream.split)
        except ValueError as error:
            raise ValueError(
                f"parallelism.tensor_parallel_degree = {splitter.mesh.size()}: {name}.{parameter}: "
                f"{error}"
            ) from None
    if isinstance(module, RMSNorm):  # over a width of which each rank has a part
        module.sum_over_width = partial(all_reduce_both_ways, group=stream.group)


def _gather_input(stream: Stream) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return stream.enter(args[0]), *args[1:]

    return hook


def _gather_output(stream: Stream) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return stream.enter(out)

    return hook


def _sum_output(linear: nn.Module, stream: Stream) -> None:
    """Its ranks' results are shares of a sum; its bias, if it has one, is no part of a share."""
    assert isinstance(linear, Linear)

    def forward(x: Tensor) -> Tensor:
        out = stream.leave(F.linear(x, linear.weight))
        return out if linear.bias is None else out + linear.bias

    setattr(linear, "forward", forward)  # noqa: B010


def _take_own_tokens(moe: MoE, residual: Stream) -> None:
    """Routing, experts and balance see each token on one rank, be the stream split or whole."""

    def before(module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x_BSD, valid_BS = args
        if not residual.split:
            x_BSD = own_slice(x_BSD, SEQUENCE, residual.group)
        return x_BSD, slice_of(valid_BS, SEQUENCE, residual.group)

    def after(module: nn.Module, args: tuple[Any, ...], out_BsD: Tensor) -> Tensor:
        return join_slices(out_BsD, SEQUENCE, residual.group)

    moe.register_forward_pre_hook(before)
    if not residual.split:
        moe.register_forward_hook(after)


def _embed(embedding: Embedding, residual: Stream) -> None:
    """Each rank looks up the tokens of its part of the vocabulary."""

    def forward(tokens_BS: Tensor) -> Tensor:
        return residual.leave(embed_slice(tokens_BS, embedding.weight, residual.group))

    setattr(embedding, "forward", forward)  # noqa: B010


def _score(head: Head, residual: Stream, whole: bool) -> None:
    """Logits of a part of the vocabulary; loss over all of it, with or without gathering them."""
    group = residual.group

    def whole_logits(logits_BSv: Tensor) -> Tensor:
        return join_slices(logits_BSv, -1, group)

    def loss_of_slices(logits_BSv: Tensor, labels_BS: Tensor) -> Tensor:
        return sliced_cross_entropy(logits_BSv, labels_BS, group)

    def loss_of_whole(logits_BSv: Tensor, labels_BS: Tensor) -> Tensor:
        return cross_entropy(whole_logits(logits_BSv), labels_BS)

    head.output.register_forward_pre_hook(_gather_input(residual))
    head.whole_logits = whole_logits
    head.cross_entropy = loss_of_whole if whole else loss_of_slices
