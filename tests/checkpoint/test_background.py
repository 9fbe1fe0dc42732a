"""The thread that saves is gone when its work is waited for: alive at exit, it aborts Python."""

import threading
import time

import pytest

from titan_moe.checkpoint.checkpointer import _Background


class SlowToLetGo:
    """As many tensors are."""

    def __del__(self) -> None:
        time.sleep(0.3)

    def save(self) -> None:
        time.sleep(0.1)  # until the thread's is the last reference

    def fail(self) -> None:
        time.sleep(0.1)
        raise RuntimeError("the disk is full")


def saving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def test_nothing_is_left_of_it() -> None:
    work = _Background(SlowToLetGo().save)
    assert saving_threads() == [work]
    work.result()
    assert saving_threads() == []


def test_its_error_is_raised_where_it_is_waited_for() -> None:
    work = _Background(SlowToLetGo().fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        work.result()
    assert saving_threads() == []
