"""A Hugging Face folder, seen by torch.distributed.checkpoint as one of our own checkpoints.

Its metadata has our names and shapes; each of our tensors is in chunks, one for each of theirs that
it is made of. So DCP itself works out which pieces a rank's shards need, under any layout, and
this reader fetches just those, straight into (views of) the shards.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titan_moe.checkpoint.state import MODEL
from titan_moe.hf.folder import Folder, Raw, Stored
from titan_moe.hf.names import Names, Part, Shape
from titan_moe.hf.quantised import Range

STACKED = 3  # tensors of so many dimensions are read slice by slice, which bounds temporaries


class HuggingFaceReader(StorageReader):
    """Of a folder that `Names.check` has passed.

    bytes_asked: read from files so far, by this process.
    """

    def __init__(self, folder: Folder, names: Names) -> None:
        self.path = folder.path
        self.bytes_asked = 0
        self._folder, self._names = folder, names
        self._places: dict[MetadataIndex, tuple[Part, Shape]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, parts in self._names.parts.items():
            chunks = []
            for part in parts:
                for offsets, sizes in _chunks(part, self._names.ours[name]):
                    self._places[MetadataIndex(MODEL + name, offsets)] = part, offsets
                    chunks.append(ChunkStorageMetadata(Size(offsets), Size(sizes)))
            dtype = self._folder.tensors[parts[0].theirs].dtype
            tensors[MODEL + name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), Size(self._names.ours[name]), chunks
            )
        return Metadata(tensors, storage_data=self._places, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """File after file, each closed before the next is opened, so that at most one is mapped
        (and for a quantised tensor the one that its scales are in)."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._stored(item).data.file, []).append(item)
        for _, items in sorted(by_file.items()):
            with ExitStack() as stack:
                files = Files(self._folder.path, stack)
                for item in items:
                    piece = self._piece(item, files)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(piece.view(target.shape) if piece.ndim < target.ndim else piece)
                    planner.commit_tensor(item, target)
                self.bytes_asked += files.bytes_asked
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _stored(self, item: ReadItem) -> Stored:
        part, _ = self._places[item.storage_index]
        return self._folder.tensors[part.theirs]

    def _piece(self, item: ReadItem, files: "Files") -> Tensor:
        """In our orientation."""
        part, offsets = self._places[item.storage_index]
        begins = [at + more for at, more in zip(offsets, item.storage_offsets, strict=True)]
        ours = [(at, at + size) for at, size in zip(begins, item.lengths, strict=True)]
        ranges: list[Range] = ours if part.index is None else ours[1:]
        if part.every is not None:
            first, step = part.every
            begin, end = ranges[-1]
            ranges[-1] = (first + step * begin, first + step * (end - 1) + 1)
        if part.transposed:
            ranges[-2:] = ranges[:-3:-1]
        piece = self._stored(item).read(ranges, files.read)
        from_first = part.every and (0, part.every[1])
        return replace(part, every=from_first).in_theirs(piece)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _chunks(part: Part, ours: Shape) -> list[tuple[Shape, Shape]]:
    """(offsets, sizes) in our tensor of what is read at once of a part."""
    if part.index is not None:
        indices = [part.index]
    elif len(ours) >= STACKED:
        indices = list(range(ours[0]))
    else:
        return [((0,) * len(ours), ours)]
    rest = ours[1:]
    return [((index, *(0 for _ in rest)), (1, *rest)) for index in indices]


class Files:
    """Files that are open until `stack` closes."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.bytes_asked = 0
        self._path, self._stack = path, stack
        self._open: dict[str, Any] = {}

    def read(self, raw: Raw, ranges: list[Range]) -> Tensor:
        if raw.file not in self._open:
            file = safe_open(self._path / raw.file, framework="pt")
            self._open[raw.file] = self._stack.enter_context(file)
        entry = self._open[raw.file].get_slice(raw.name)
        piece: Tensor = entry[tuple(slice(begin, end) for begin, end in ranges)]
        self.bytes_asked += piece.numel() * piece.element_size()
        return piece
