"""Whether gradients over tensor-parallel ranks are what a recipe's sharding says: shares, or whole.

A forgotten pattern leaves forward as it was, and some gradients counted twice or in part. It shows
in what ranks have before anything is added up: shares differ, and whole gradients are the same.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.world import gather

# Of a gradient's norm. The same sums, on another device of the same kind, differ by rounding at
# most; a gradient of some heads alone differs from that of others by about its own size.
ROUNDING = 1e-2


def check_shares(gradients: dict[str, tuple[Tensor, bool]], group: dist.ProcessGroup) -> None:
    """Collective over the world, so that all ranks end together.

    gradients: by name, this rank's slice, and whether it is a share of a sum over `group`.

    Raises:
        ValueError: on all ranks, naming a parameter whose gradient is not what it is taken for.
    """
    own = [_fingerprint(gradient) for gradient, _ in gradients.values()]
    fault = None
    if own:
        mine = torch.stack(own)
        of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(of_ranks, mine, group=group)
        prints_RP2 = torch.stack(of_ranks)
        size_P = prints_RP2[..., 1].amax(dim=0)
        apart_P = (prints_RP2 - prints_RP2[0]).abs().amax(dim=(0, 2))
        shares = torch.tensor([partial for _, partial in gradients.values()], device=mine.device)
        wrong_P = torch.where(shares, apart_P == 0, apart_P > ROUNDING * size_P) & (size_P > 0)
        wrong = [n for n, is_wrong in zip(gradients, wrong_P.tolist(), strict=True) if is_wrong]
        fault = _fault(wrong[0], gradients[wrong[0]][1]) if wrong else None
    faults = [of_rank for of_rank in gather(fault) if of_rank is not None]
    if faults:
        raise ValueError(faults[0])


def _fingerprint(gradient: Tensor) -> Tensor:
    """fp64 [2]: a projection on a fixed direction, and the norm."""
    flat = gradient.flatten().double()
    direction = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64).cos()
    return torch.stack([flat @ direction, flat.norm()])


def _fault(name: str, partial: bool) -> str:
    if partial:
        return (
            f"tensor parallel: every rank has the same gradient of {name}, but they would be added "
            f"up: it acts outside of what is split; name its module in sharding.residual"
        )
    return (
        f"tensor parallel: ranks have different gradients of {name}, each taken for the whole: a "
        f"split linear that it feeds has no pattern in sharding.gather_inputs or .gather_outputs"
    )
