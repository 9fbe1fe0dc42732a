"""A pool of gloo processes, started once and used again: starting them costs more than a case.

    def case(scale: float) -> float:            # at module level, so that a worker can import it
        return scale * torch.distributed.get_rank()

    def test_it(pool: Pool) -> None:
        assert pool.run(2, case, 10.0) == [0.0, 10.0]

Workers live until the pool is closed, so a case must not leave global state behind (default dtype,
threads, environment); its process group is made for it and destroyed after it.
"""

import contextlib
import datetime
import faulthandler
import functools
import gc
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

# After one rank's exception the others usually hang in a collective: wait this long for them.
GRACE_SECONDS = 2.0


class Answer(NamedTuple):
    """What one worker sends back: a result, or an exception and its traceback as text."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    failed_at: float = 0.0  # on a clock that all processes share; a death comes before its echoes


class Pool:
    """At most `size` single-threaded processes; the first n of them run each case."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(
        self,
        world: int,
        case: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = 180.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `case(*args, **kwargs)` on `world` ranks of a fresh gloo group.

        Returns the ranks' results in order; all of it must be picklable. The first exception of any
        rank is raised here with the worker's traceback as a note. A case that does not end in time
        raises TimeoutError naming the silent ranks. After either, hung workers are replaced.
        """
        assert 1 <= world <= self.size, f"{world} ranks asked of a pool of {self.size}"
        self._start(world)
        with tempfile.TemporaryDirectory() as folder:
            order = (case, args, kwargs, str(Path(folder) / "store"), world, timeout_seconds)
            for rank, (_, connection) in enumerate(self._workers[:world]):
                connection.send_bytes(pickle.dumps((rank, sys.path)))
                connection.send_bytes(pickle.dumps(order))
            answers = self._collect(world, timeout_seconds)
        return [answers[rank].result for rank in range(world)]

    def close(self) -> None:
        """End every worker; the next run starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def _start(self, world: int) -> None:
        # One server imports torch; workers are forked from it before it has any thread.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor"])
        started = len(self._workers)
        while len(self._workers) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, connection in self._workers[started:]:
            assert connection.recv_bytes() == b"ready"

    def _collect(self, world: int, timeout_seconds: float) -> dict[int, Answer]:
        ranks = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world])}
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(answers) < world:
            waiting = [connection for connection, rank in ranks.items() if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                answer = self._receive(connection, ranks[connection])
                answers[ranks[connection]] = answer
                if answer.error:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        silent = sorted(set(range(world)) - answers.keys())
        failures = [answer for answer in answers.values() if answer.error]
        if silent or not all(failure.trace for failure in failures):
            self.close()
        if failures:
            # What other ranks say of it may well arrive before the cause does.
            failure = min(failures, key=lambda answer: answer.failed_at)
            assert failure.error is not None
            failure.error.add_note(failure.trace)
            raise failure.error
        if silent:
            raise TimeoutError(f"ranks {silent} of {world} did not end in {timeout_seconds} s")
        return answers

    def _receive(self, connection: Connection, rank: int) -> Answer:
        try:
            answer = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            process = self._workers[rank][0]
            process.join()
            return Answer(error=RuntimeError(f"rank {rank} died, exit code {process.exitcode}"))
        assert isinstance(answer, Answer)
        return answer


def _work(connection: Connection) -> None:
    """A worker's life: orders in, answers out, until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    faulthandler.enable()
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            rank, sys.path[:] = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_answer(rank, connection.recv_bytes()))


def _answer(rank: int, order: bytes) -> bytes:
    from torch import distributed as dist

    failed_at = 0.0
    try:
        case, args, kwargs, store, world, timeout_seconds = pickle.loads(order)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        dist.barrier()  # else a rank that is done may leave while another is still connecting
        try:
            return pickle.dumps(Answer(result=case(*args, **kwargs)))
        except Exception:
            failed_at = time.monotonic()
            raise
        finally:
            dist.destroy_process_group()
            _forget_meshes()
    except Exception as error:
        trace = f"on rank {rank}:\n{traceback.format_exc()}"
        try:
            pickled = pickle.dumps(Answer(None, error, trace, failed_at))
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(Answer(None, RuntimeError(repr(error)), trace, failed_at))
        return pickled


def _forget_meshes() -> None:
    """Clear torch's caches that keep meshes, and with them process groups and three threads each.

    A worker that ran a hundred cases would otherwise have thousands of threads.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    caches = [it for it in gc.get_objects() if type(it) is functools._lru_cache_wrapper]
    for cache in caches:
        if cache.__module__.startswith("torch.distributed"):
            cache.cache_clear()
    getattr(_redistribute, "_planner_cache", {}).clear()
    gc.collect()
