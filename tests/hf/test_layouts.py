"""Saved under one layout, exported, and imported under another: the same bits."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.parity.cases import Case, config_of
from tests.parity.run import build, whole
from titan_moe.check.pool import Pool
from titan_moe.config.sections import Data, RunConfig, Source
from titan_moe.hf.export import export
from titan_moe.hf.importing import save_weights
from titan_moe.hf.load import load_weights
from titan_moe.hf.values import CheckpointValues
from titan_moe.recipe import load_recipe
from titan_moe.world import gather

Values = dict[str, Tensor]

SAVED = [Case(shards=2, ep=2), Case("deepseek_v3_mtp", pp=2)]
LOADED = [
    (0, Case(tp=2)),
    (0, Case(pp=2)),
    (0, Case(tp=2, shards=2, ep=4)),
    (0, Case(shards=4, ep=2)),
    (0, Case(replicas=2, shards=2)),
    (1, Case("deepseek_v3_mtp")),
    (1, Case("deepseek_v3_mtp", tp=2)),
]


def run_config(case: Case) -> RunConfig:
    source = Source(name="none", path="none")
    data = Data(tokenizer="byte", add_bos=False, add_eos=False, num_streams=1, sources=(source,))
    return config_of(case).model_copy(update={"data": data})


def tensors(case: Case) -> tuple[list[torch.nn.Module], Values, Values]:
    """Parts, their live tensors, and all tensors of the model as they are now."""
    engine, meshes = build(case)
    live: Values = {}
    for part in engine.parts:
        live |= dict(part.named_parameters())
        live |= {k: b for k, b in part.named_buffers() if k.endswith("selection_bias")}
    bias = [tensor for name, tensor in live.items() if name.endswith("selection_bias")]
    for index, tensor in enumerate(bias):
        tensor.fill_(0.123456 + index)
    state = {name: whole(tensor) for name, tensor in live.items()}
    everywhere = gather(state, meshes.pipeline.get_group())
    return engine.parts, live, {k: v for stage in everywhere for k, v in stage.items()}


def save(case: Case, folder: Path) -> Values:
    parts, _, state = tensors(case)
    save_weights(parts, folder / "ours", run_config(case))
    export(folder / "ours", folder / "theirs", dtype="float32", shard_bytes=40_000)
    return state


def load(case: Case, folder: Path) -> tuple[Values, int, int]:
    """What this rank holds after loading, bytes that it read, bytes of its own shards."""
    parts, live, _ = tensors(case)
    local = [t.to_local() if isinstance(t, DTensor) else t for t in live.values()]
    for tensor in local:
        tensor.detach().fill_(math.nan)
    model = config_of(case).model
    read = load_weights(parts, folder / "theirs", load_recipe(model.recipe), model)
    own = sum(tensor.numel() * tensor.element_size() for tensor in local)
    return {name: whole(tensor) for name, tensor in live.items()}, read, own


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Values]]:
    folders = [tmp_path_factory.mktemp("saved") for _ in SAVED]
    return [
        (folder, pool.run(case.world, save, case, folder)[0])
        for case, folder in zip(SAVED, folders, strict=True)
    ]


@pytest.mark.parametrize(("source", "case"), LOADED, ids=str)
def test_the_same_bits_under_any_layout(
    pool: Pool, saved: list[tuple[Path, Values]], source: int, case: Case
) -> None:
    folder, state = saved[source]
    seen: set[str] = set()
    for held, read, own in pool.run(case.world, load, case, folder):
        for name, tensor in held.items():
            assert torch.equal(tensor, state[name]), name
        seen |= held.keys()
        assert read == own  # each rank asks for what it holds, and not a byte more
    assert seen == state.keys()


def test_the_ranks_wrote_every_file_between_them(saved: list[tuple[Path, Values]]) -> None:
    for folder, state in saved:
        theirs = folder / "theirs"
        index = json.loads((theirs / "model.safetensors.index.json").read_text())
        files = {path.name for path in theirs.glob("*.safetensors")}
        assert len(files) > 4
        assert files == set(index["weight_map"].values())
        assert max(path.stat().st_size for path in theirs.glob("*.safetensors")) < 60_000
        bias = "layers.1.moe.router.selection_bias"
        assert torch.equal(CheckpointValues(folder / "ours").tensor(bias), state[bias])


def test_prediction_ahead_has_its_copies(saved: list[tuple[Path, Values]]) -> None:
    """As published files do: embedding and head once more in each of its layers."""
    folder, state = saved[1]
    files = (folder / "theirs").glob("*.safetensors")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for layer in (4, 5):
        names = {"embed_tokens": "embedding.weight", "shared_head.head": "head.output.weight"}
        for theirs, ours in names.items():
            assert torch.equal(written[f"model.layers.{layer}.{theirs}.weight"], state[ours])
        project = state[f"layers.{layer}.project.weight"]
        assert torch.equal(written[f"model.layers.{layer}.eh_proj.weight"], project)
