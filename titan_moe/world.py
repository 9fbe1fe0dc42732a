"""The processes of a run: how they find each other, agree, and hear that they should stop.

What agrees is for any group of processes; without a process group, one process agrees with itself.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titan_moe.config.sections import Comm

T = TypeVar("T")

# To stop in good order: a scheduler's, a person's, a closed terminal's.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class World:
    """This process's place among all processes of the run."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, comm: Comm) -> "World":
        """Meet the other processes that torchrun started; alone, be a world of one.

        Host-side agreement runs over gloo even where tensors travel by NCCL, so that asking whether
        to stop never waits for the device.
        """
        rank = int(os.environ.get("RANK", "0"))
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        else:
            device = torch.device("cpu")
            backend = "gloo"
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=size,
            store=None if "MASTER_ADDR" in os.environ else dist.HashStore(),
            timeout=timedelta(seconds=comm.init_timeout_seconds),
        )
        return cls(rank, size, device)

    def leave(self) -> None:
        dist.destroy_process_group()

    def shorten_timeouts(self, comm: Comm) -> None:
        """Wait for `train_timeout_seconds` from now on: the first step, always slow, is through.

        Where checkpoints meet, the slowest disk sets the pace; that group keeps its own timeout.
        """
        timeout = timedelta(seconds=comm.train_timeout_seconds)
        for group in list(dist.distributed_c10d._world.pg_map):
            if dist.get_rank(group) >= 0 and group.group_desc != "checkpoint":
                dist.distributed_c10d._set_pg_timeout(timeout, group)


def any_rank(flag: bool) -> bool:
    """Whether any rank of the world says so. Collective, and over gloo: no device is waited for."""
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


def on_first_rank(act: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `act` on rank 0 and give its result to all of `group` (the world). Collective.

    Raises:
        ValueError: on every rank, with rank 0's message, if it raised one or an OSError.
    """
    answer: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            answer[0] = act()
        except (ValueError, OSError) as error:
            answer[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0, group=group)
    if answer[1] is not None:
        raise ValueError(answer[1])
    result: T = answer[0]
    return result


def gather(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's object, in order of rank, on every rank of `group` (the world). Collective."""
    if not dist.is_initialized():
        return [mine]
    all_of_them = [mine] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group=group)
    return all_of_them


class StopSignal:
    """Remembers the STOP_SIGNALS instead of dying of them; a repeated signal changes nothing.

    The end of the launcher is one more reason to stop: nobody would be left to stop this process,
    and the next launch would find it training in the same folder.
    """

    def __init__(self) -> None:
        self._signal: str | None = None
        self._launcher = os.getppid()
        for number in STOP_SIGNALS:
            is_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not is_nohup:
                signal.signal(number, self._remember)

    @property
    def reason(self) -> str | None:
        """Why to stop; None: go on."""
        if self._signal is None and os.getppid() != self._launcher:
            return "the launcher's end"
        return self._signal

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number).name
