"""Sees every operator of a traced step: what it makes, sends and multiplies."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.planner.figures import Dimension
from titan_moe.planner.message import Message, When
from titan_moe.planner.trace.counts import Kind, Moment
from titan_moe.planner.trace.groups import COLLECTIVES, Groups, message
from titan_moe.planner.trace.ledger import Ledger
from titan_moe.planner.trace.matmuls import ATTENTION, flops_of

aten, c10d = torch.ops.aten, torch.ops.c10d
# Where it is neither forward nor backward.
_WHEN: dict[Kind, When] = {
    "step": "step",
    "reduction": "step",
    "gather": "micro-batch",
    "hop": "micro-batch",
}

# Their parts are seen one by one, each at its local size.
WRAPPERS = (DTensor, AsyncCollectiveTensor)


class Recorder(TorchDispatchMode):
    """The mode on top of fake tensors. moment: of now; whoever runs the step says it.

    read: what tensors of integers have, where the host asks.
    messages, flops, attention_flops: by moment.
    """

    def __init__(self, groups: Groups, read: int) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ledger.when = self._when
        self.moment = Moment("step")
        self.messages: Counter[tuple[Moment, Message]] = Counter()
        self.flops: Counter[tuple[Moment, str]] = Counter()
        self._groups, self._read = groups, read
        self._what = ""  # of messages, and their dimension, where it is known
        self._of: Dimension | None = None
        self._is_wrapper: dict[type, bool] = {}

    @contextmanager
    def during(self, moment: Moment) -> Iterator[None]:
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = before

    @contextmanager
    def sending(self, what: str, of: Dimension) -> Iterator[None]:
        before, self._what, self._of = (self._what, self._of), what, of
        try:
            with self.ledger.making("buffers"):
                yield
        finally:
            self._what, self._of = before

    def forget(self) -> None:
        """What was before the step that counts."""
        self.ledger.forget_peak()
        self.messages.clear()
        self.flops.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(self._wraps, types)):
            return NotImplemented
        if func is aten._local_scalar_dense.default:
            return self._value(args[0].dtype)
        result = func(*args, **(kwargs or {}))
        if func in COLLECTIVES:
            self._send(func, args)
        else:
            self._count(result)
            if flops := flops_of(func, args, result):
                kind = "attention" if func in ATTENTION else "matmul"
                self.flops[self.moment, kind] += flops
        return result

    def _wraps(self, kind: type) -> bool:
        if (known := self._is_wrapper.get(kind)) is None:
            known = self._is_wrapper[kind] = issubclass(kind, WRAPPERS)
        return known

    def _count(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self.ledger.count(result)
        elif isinstance(result, (list, tuple)):
            for each in result:
                self._count(each)

    def _send(self, func: Any, args: Any) -> None:
        when = _WHEN.get(self.moment.kind) or ("backward" if in_backward() else "forward")
        sent = message(func, args, self._groups, when=when, what=self._what, of=self._of)
        if sent is not None:
            self.messages[self.moment, sent] += 1
        if func is c10d.alltoall_base_.default:
            for tensor in args[:2]:
                self.ledger.relabel(tensor, "buffers")

    def _value(self, dtype: torch.dtype) -> float | int | bool:
        if dtype is torch.bool:
            return False
        return 1.0 if dtype.is_floating_point else self._read

    def _when(self) -> str:
        if self.moment.kind == "pass":
            return f"{'backward' if in_backward() else 'forward'} of {self.moment}"
        return str(self.moment)


def in_backward() -> bool:
    """Whether autograd is running."""
    return torch._C._current_graph_task_id() != -1
