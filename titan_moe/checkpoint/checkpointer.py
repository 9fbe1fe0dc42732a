"""Save and load a whole run: torch.distributed.checkpoint below, a commit marker on top."""

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from titan_moe.checkpoint import folder as disk
from titan_moe.checkpoint.compare import Differences, Signature
from titan_moe.checkpoint.state import MODEL, fill_copies, model_tensors, optimizer_tensors
from titan_moe.config.sections import Checkpoint
from titan_moe.world import gather, on_first_rank

logger = logging.getLogger(__name__)


class Checkpointer:
    """Checkpoints of one run. Every method is collective: all ranks call it, in the same order."""

    def __init__(
        self,
        folder: Path,
        section: Checkpoint,
        parts: list[nn.Module],
        optimizer: Optimizer,
        timeout_seconds: int = 1800,
    ) -> None:
        """
        folder: where the step-N folders live; on a file system that all ranks share.
        parts: this rank's share of the model.
        timeout_seconds: how long ranks wait for each other's writing; it has to cover the slowest
            disk, not a collective of training.
        """
        self.folder = folder
        self.section = section
        self.parts = parts
        self.optimizer = optimizer
        self._last_step: int | None = None  # saved or loaded by this object; nothing newer is known
        self._pending: _Background | None = None
        # Ranks meet here and nowhere else: background writing must not mix with training's groups.
        # It is theirs too who come from or go to other formats, whose disks are as slow.
        self.group = (
            dist.new_group(
                backend="gloo",
                timeout=timedelta(seconds=timeout_seconds),
                group_desc="checkpoint",
            )
            if dist.is_initialized()
            else None
        )

    def save(self, step: int, train_state: dict[str, Any]) -> None:
        """Write the checkpoint of `step`; with `async_mode = "async"`, in the background.

        What is written are the values at the time of the call. Saving the step that was just saved
        or loaded does nothing: it is on disk already.

        train_state: JSON-able, the same on all ranks; comes back from `load`.

        Raises:
            RuntimeError: this save failed, or an earlier asynchronous one did.
        """
        self.finish()
        if step == self._last_step:
            logger.info("checkpoint of step %d is there already", step)
            return
        text = json.dumps({"schema_version": disk.SCHEMA_VERSION, "step": step} | train_state)
        writer = _CommittingWriter(self.folder, step, text, self.section.keep_latest_k)
        tensors = self._tensors()
        if self.section.async_mode == "disabled":
            self._write(step, tensors, writer)
        else:
            # Detached, because torch would copy a parameter together with its gradient.
            staged = writer.stage({name: tensor.detach() for name, tensor in tensors.items()})
            self._pending = _Background(lambda: self._write(step, staged, writer))
        self._last_step = step

    def load(self) -> dict[str, Any] | None:
        """Resume: fill model and optimizer from `load_step`, or the newest complete checkpoint.

        Returns the train state that was saved, or None where nothing has been saved yet.

        Raises:
            ValueError: `load_step` is not there; or the checkpoint is damaged, of a newer schema,
                or of another model.
        """
        self.finish()
        chosen = on_first_rank(self._choose, self.group)
        if chosen is None:
            return None
        path, train_state = chosen
        self._read(path, self._tensors(), model_only=False)
        fill_copies(self.parts, self.optimizer)
        self._last_step = train_state["step"]
        return dict(train_state)

    def load_weights(self, path: str | Path) -> None:
        """Start from another run's weights: parameters and persistent buffers, not the optimizer.

        Floating-point types may differ; values are cast.

        path: a complete step-N folder.

        Raises:
            ValueError: no complete checkpoint there, or its model is another one.
        """
        path = Path(path)
        on_first_rank(lambda: disk.check_committed(path), self.group)
        self._read(path, model_tensors(self.parts), model_only=True)
        fill_copies(self.parts, None)
        logger.info("weights loaded from %s", path)

    def finish(self) -> None:
        """Wait for an asynchronous save.

        Raises:
            RuntimeError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _tensors(self) -> dict[str, Tensor]:
        return model_tensors(self.parts) | optimizer_tensors(self.parts, self.optimizer)

    def _write(self, step: int, tensors: dict[str, Tensor], writer: "_CommittingWriter") -> None:
        try:
            dcp_save(tensors, storage_writer=writer, process_group=self.group)
        except CheckpointException as error:
            raise RuntimeError(f"saving {writer.path} failed: {_reason(error)}") from error
        logger.info("checkpoint of step %d saved", step)

    def _read(self, path: Path, tensors: dict[str, Tensor], model_only: bool) -> None:
        reader = FileSystemReader(path)
        stored: dict[str, Signature] = on_first_rank(lambda: _contents(reader), self.group)
        if model_only:
            stored = {name: what for name, what in stored.items() if name.startswith(MODEL)}
        wanted = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        differences = gather(Differences.between(stored, wanted), self.group)
        complaints = Differences.of_all_ranks(differences).complaints(cast_floats=model_only)
        if complaints:
            raise ValueError(f"{path} holds another model: {'; '.join(complaints)}")
        try:
            dcp_load(tensors, storage_reader=reader, process_group=self.group)
        except CheckpointException as error:
            raise ValueError(f"{path} is damaged: {_reason(error)}") from error

    def _choose(self) -> tuple[Path, dict[str, Any]] | None:
        steps = disk.committed_steps(self.folder)
        if self.section.load_step == -1:
            if not steps:
                return None
            step = steps[-1]
        else:
            step = self.section.load_step
            if step not in steps:
                there = ", ".join(map(str, steps)) if steps else "none"
                raise ValueError(
                    f"checkpoint.load_step = {step}: no complete checkpoint of that step in "
                    f"{self.folder}; complete steps: {there}"
                )
            if step != steps[-1]:
                logger.warning(
                    "resuming from step %d, though step %d is complete: the next save sets later "
                    "checkpoints aside, as step-<n>.abandoned",
                    step,
                    steps[-1],
                )
        path = disk.step_folder(self.folder, step)
        train_state = disk.read_train_state(path)
        if train_state["step"] != step:
            raise ValueError(f"{path}: holds step {train_state['step']}; rename it back")
        if train_state.get(disk.WEIGHTS_ONLY):
            raise ValueError(
                f"{path}: holds weights alone, from which no run resumes; move it out of "
                f"{self.folder}, and name it by checkpoint.initial_load_path"
            )
        return path, train_state


class _CommittingWriter(FileSystemWriter):
    """Writes into a fresh step folder, and commits once every rank's files are on disk.

    The two hooks run on the coordinating rank alone, between rounds in which DCP hears from all
    ranks, so that a failure anywhere is a failure everywhere and nothing is committed.
    """

    def __init__(self, folder: Path, step: int, train_state: str, keep_latest_k: int) -> None:
        super().__init__(disk.step_folder(folder, step))
        self._folder, self._step = folder, step
        self._train_state, self._keep_latest_k = train_state, keep_latest_k

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # nobody touches the disk before all plans are in

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        path = disk.step_folder(self._folder, self._step)
        if path.exists():  # left by a save that did not finish, or by a run that was wound back
            disk.remove(path)
        path.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        path = disk.step_folder(self._folder, self._step)
        disk.write_durably(path / disk.TRAIN_STATE, self._train_state)
        disk.commit(path, self._step)
        try:
            self._clear_up()
        except OSError as error:  # the checkpoint is safe, and training goes on
            logger.warning("%s: cannot be cleared up: %s", self._folder, error)

    def _clear_up(self) -> None:
        for step in disk.set_aside(self._folder, self._step):
            logger.info("checkpoint of step %d set aside: the run went back", step)
        for step in disk.purge(self._folder, self._keep_latest_k, self._step):
            logger.info("checkpoint of step %d deleted", step)


class _Background(Thread):
    """Work in a thread that ends with the process: one of an executor would be joined at exit, and
    hold a process whose peers are gone."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            self._error = error
        self._work = None  # and the tensors with it

    def result(self) -> None:
        """Wait, and raise what the work raised. For the thread itself, not only for its work: one
        that still lets go of tensors while Python shuts down aborts the process."""
        self.join()
        if self._error is not None:
            raise self._error


def _contents(reader: FileSystemReader) -> dict[str, Signature]:
    """Names, shapes and types in a checkpoint."""
    try:
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling damaged bytes may raise
        raise ValueError(f"{reader.path} is damaged: no readable metadata: {error!r}") from error
    return {
        name: (tuple(what.size), what.properties.dtype)
        for name, what in stored.items()
        if isinstance(what, TensorStorageMetadata)
    }


def _reason(error: CheckpointException) -> str:
    """The ranks' own errors, without DCP's traceback text."""
    return "; ".join(
        f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items())
    )
