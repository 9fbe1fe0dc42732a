"""Run a forward again at most once, in however many calls of autograd backward is taken.

A schedule that splits backward calls autograd for the inputs of a stage, and then for each group
of its weights. torch's checkpoint would run a block again for every call, some 18 times where the
attention is latent. Here the first call runs it, and what it saves lasts until the last has used
it, as it would where nothing is recomputed.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Slot:
    """In the graph, the place of a tensor that forward saved for backward."""

    tensor: Tensor | None = None


class _AllThereError(Exception):
    """What backward needs is complete; the rest of the forward would be run for nothing."""


def run_and_forget(forward: Callable[[], Any], again: Callable[[], Any]) -> Any:
    """What `forward` returns; of what it saves for backward nothing is kept.

    again: the same forward, as it is to be run when backward comes.
    """
    run = _Run(again)
    with saved_tensors_hooks(run.keep_place, run.fill):
        return forward()


class _Run:
    """One forward that may be run again."""

    def __init__(self, again: Callable[[], Any]) -> None:
        self._again: Callable[[], Any] | None = again
        # Weak, so that a tensor goes as soon as the graph lets go of its place.
        self._slots: list[weakref.ref[_Slot]] = []

    def keep_place(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        self._slots.append(weakref.ref(slot))
        return slot

    def fill(self, slot: _Slot) -> Tensor:
        if self._again is not None:
            again, self._again = self._again, None  # and the arguments that it holds
            self._run(again)
        assert slot.tensor is not None, "run again, the forward saved less than before"
        return slot.tensor

    def _run(self, again: Callable[[], Any]) -> None:
        places = enumerate(self._slots, start=1)

        def put(tensor: Tensor) -> None:
            number, place = next(places)
            if (slot := place()) is not None:
                slot.tensor = tensor.detach()
            if number == len(self._slots):
                raise _AllThereError

        with suppress(_AllThereError), torch.enable_grad(), saved_tensors_hooks(put, _never):
            again()


def _never(nothing: None) -> Tensor:
    raise AssertionError("backward through a forward that was run again")
