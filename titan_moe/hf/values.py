"""Where an export takes numbers from: a checkpoint on disk, or a model in memory."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Size, Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.futures import Future

from titan_moe.checkpoint.state import MODEL, model_tensors
from titan_moe.hf.names import Names, Part, Shape, listed

Piece = tuple[Part, Tensor]


class Values(Protocol):
    """Of one model."""

    def check(self, names: Names) -> None:
        """Raises ValueError: its tensors are not those of the model."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One of ours, whole."""
        ...

    def fill(self, pieces: list[Piece]) -> None:
        """Write each part into its tensor of theirs, cast to its type."""
        ...


class ModelValues:
    """Of a whole model in this process."""

    def __init__(self, model: nn.Module) -> None:
        tensors = model_tensors([model]).items()
        self._tensors = {name.removeprefix(MODEL): tensor.detach() for name, tensor in tensors}

    def check(self, names: Names) -> None:
        _same({name: tuple(t.shape) for name, t in self._tensors.items()}, names, "the model")

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def fill(self, pieces: list[Piece]) -> None:
        for part, theirs in pieces:
            part.in_theirs(theirs).copy_(part.in_ours(self._tensors[part.ours]))


class CheckpointValues:
    """Of a step-N folder, whatever layout it was saved under.

    Raises ValueError: nothing in it says what tensors it holds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            stored = _Chunks(path).read_metadata().state_dict_metadata
        except FileNotFoundError:
            raise ValueError(f"{path}: no .metadata in it: not a whole checkpoint") from None
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path / '.metadata'}: damaged: {error!r}") from None
        self._stored = {
            name.removeprefix(MODEL): what
            for name, what in stored.items()
            if name.startswith(MODEL) and isinstance(what, TensorStorageMetadata)
        }

    def check(self, names: Names) -> None:
        shapes = {name: tuple(what.size) for name, what in self._stored.items()}
        _same(shapes, names, str(self._path))

    def tensor(self, name: str) -> Tensor:
        what = self._stored[name]
        tensors = {MODEL + name: torch.empty(what.size, dtype=what.properties.dtype)}
        self._load(tensors, DefaultLoadPlanner())
        return tensors[MODEL + name]

    def fill(self, pieces: list[Piece]) -> None:
        self._load({}, _Slices(pieces))

    def _load(self, tensors: dict[str, Tensor], planner: LoadPlanner) -> None:
        try:
            dcp_load(tensors, storage_reader=_Chunks(self._path), planner=planner, no_dist=True)
        except CheckpointException as error:
            [(reason, _)] = error.failures.values()
            raise ValueError(f"{self._path} is damaged: {reason!r}") from error


def _same(stored: dict[str, Shape], names: Names, where: str) -> None:
    missing = [name for name in names.ours if name not in stored]
    extra = [name for name in stored if name not in names.ours]
    unlike = [
        f"{name} is {list(stored[name])}, by the model's sizes {list(shape)}"
        for name, shape in names.ours.items()
        if name in stored and stored[name] != shape
    ]
    kinds = (("missing", missing), ("no tensor of the model", extra), ("of another shape", unlike))
    complaints = [f"{what}: {listed(found)}" for what, found in kinds if found]
    if complaints:
        raise ValueError(f"{where}: {'; '.join(complaints)}")


class _Slices(DefaultLoadPlanner):
    """Asks for parts of tensors, and has them written where they lie in theirs."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        self._pieces = pieces

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for number, (part, _) in enumerate(self._pieces):
            stored = self.metadata.state_dict_metadata[MODEL + part.ours]
            assert isinstance(stored, TensorStorageMetadata)
            offsets, sizes = [0] * len(stored.size), list(stored.size)
            if part.index is not None:
                offsets[0], sizes[0] = part.index, 1
            chunk = ChunkStorageMetadata(Size(offsets), Size(sizes))
            place = MetadataIndex(str(number))
            items += [
                replace(item, dest_index=place)
                for item in create_read_items_for_chunk_list(MODEL + part.ours, stored, [chunk])
            ]
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part, theirs = self._pieces[int(read_item.dest_index.fqn)]
        view = part.in_theirs(theirs)
        view = view if part.index is None else view.unsqueeze(0)
        for dim, (begin, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, begin, size)
        return view


class _Chunks(FileSystemReader):
    """Reads each chunk that was saved once, however many slices of it are asked for."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_chunk: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            by_chunk.setdefault(item.storage_index, []).append(item)
        for index, items in by_chunk.items():
            info = self.storage_data[index]
            with Path(self.path, info.relative_path).open("rb") as file:
                chunk = torch.load(self._slice_file(file, info), "cpu", weights_only=True)
            for item in items:
                piece = chunk
                for dim, (begin, size) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    piece = piece.narrow(dim, begin, size)
                planner.resolve_tensor(item).detach().copy_(piece)
        done: Future[None] = Future()
        done.set_result(None)
        return done
