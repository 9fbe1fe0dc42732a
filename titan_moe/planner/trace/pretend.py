"""What a rank hears from others and from its tensors' values, where there are neither."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, wraps
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from titan_moe.config.sections import RunConfig
from titan_moe.layers.moe import MoE
from titan_moe.parallel import engine, pending
from titan_moe.parallel.dispatch.flat import FlatDispatcher
from titan_moe.parallel.dispatch.rows import Sizes
from titan_moe.parallel.dispatch.two_tier import TwoTierDispatcher
from titan_moe.parallel.initialise import unwrapped
from titan_moe.parallelize import build_on_meta
from titan_moe.planner.case import Case


class Everything:
    """Contains any name: nothing is left to initialise."""

    def __contains__(self, name: object) -> bool:
        return True


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is value, while it lasts."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def pretended_world(case: Case, rank: int) -> Iterator[None]:
    """A process group whose other ranks are not there: nothing is sent, nobody is waited for.

    What ranks tell each other of their stages is looked up. Nothing is checked that only a first
    step checks.
    """
    assert not dist.is_initialized(), "a pretended world beside a real one"
    others = _Others(case)
    dist.init_process_group("fake", rank=rank, world_size=case.layout.world, store=FakeStore())
    try:
        with ExitStack() as stack:
            for module in (engine, pending):
                stack.enter_context(replaced(module, "gather", others.gather))
            stack.enter_context(replaced(pending, "check_shares", lambda *args: None))
            stack.enter_context(replaced(_PipelineSchedule, "_warmup_p2p", _agree))
            for name in ("__getitem__", "__init__"):
                real = _with_values(getattr(DeviceMesh, name))
                stack.enter_context(replaced(DeviceMesh, name, real))
            yield
    finally:
        dist.destroy_process_group()


def _agree(schedule: Any, stages: list[PipelineStage], *args: Any) -> None:
    """All stages were told what they take and give, as each would hear from all others."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _with_values(method: Callable[..., Any]) -> Callable[..., Any]:
    """Numbers of ranks are real, whatever tensors a mesh keeps them in."""

    @wraps(method)
    def outside(*args: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **keywords)

    return outside


class _Others:
    """What every rank of a pipeline has, from the same recipe."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def gather(self, mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """As `world.gather`, of one rank per stage.

        mine: names of MoE layers (a list), or of weights, and in how many parts each is (a dict).
        """
        if self._case.layout.pp == 1:
            return [mine]
        if isinstance(mine, list):
            return [moes for moes, _ in self._held]
        assert isinstance(mine, dict)
        return [dict(weights) for _, weights in self._held]

    @cached_property
    def _held(self) -> list[tuple[list[str], Counter[str]]]:
        case = self._case
        held: list[tuple[list[str], Counter[str]]] = [
            ([], Counter()) for _ in range(case.layout.pp)
        ]
        for stage in case.stages:
            part = build_on_meta(case.config, case.recipe, stage)
            moes, weights = held[case.holders[stage.index]]
            moes += [name for name, module in part.named_modules() if isinstance(module, MoE)]
            weights.update(unwrapped(name) for name, _ in part.named_parameters())
        return held


def balanced(config: RunConfig) -> RunConfig:
    """Routing whose sizes follow from shapes."""
    debug = config.debug.model_copy(update={"moe_force_load_balance": True})
    return config.model_copy(update={"debug": debug})


def heat(parts: list[nn.Module], imbalance: float) -> None:
    """So many times the mean number of rows arrive at this rank's experts, in place."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, MoE):
                dispatcher = module.dispatcher
                if isinstance(dispatcher, FlatDispatcher | TwoTierDispatcher):
                    sizes = _heated(getattr(dispatcher, "_sizes"), imbalance)  # noqa: B009
                    setattr(dispatcher, "_sizes", sizes)  # noqa: B010


def _heated(sizes_of: Callable[..., Any], imbalance: float) -> Callable[..., Any]:
    def heated(sizes: Sizes) -> Sizes:
        return replace(sizes, arriving=[round(rows * imbalance) for rows in sizes.arriving])

    def sizes(*args: Any) -> Any:
        balanced = sizes_of(*args)
        if isinstance(balanced, Sizes):
            return heated(balanced)
        return replace(balanced, inside=heated(balanced.inside))

    return sizes
