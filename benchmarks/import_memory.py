"""Peak host memory of an import: no rank above its own shards and one file's worth.

    python benchmarks/import_memory.py [--gb 4] [--ranks 4] [--layout fsdp|tp]

Makes a synthetic sharded checkpoint of about so many gigabytes in a temporary folder, of zeros that
take no room on most file systems but do in memory, imports it onto so many ranks, and prints for
each rank the peak of its resident memory above what it had before the model was built, its own
shards, the largest file, and whether the peak is within both.
"""

import argparse
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from titan_moe.config import RunConfig, load_config
from titan_moe.config.layout import Layout
from titan_moe.config.sections import Comm
from titan_moe.hf.config_json import config_json
from titan_moe.hf.export import plan_files
from titan_moe.hf.load import load_weights
from titan_moe.hf.names import names_of
from titan_moe.mesh import Meshes
from titan_moe.parallelize import parallelize
from titan_moe.recipe import load_recipe
from titan_moe.world import World, gather

ROOT = Path(__file__).parents[1]
SHARD_BYTES = 500_000_000
# One layer of these sizes has some 0.27 G weights, in bf16 half a gigabyte.
SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 160,
    "num_dense_layers": 0,
}
SLACK = 100_000_000  # allocator, buffers of gloo, DCP's plans


def config_of(gigabytes: float, layout: str, ranks: int) -> RunConfig:
    """As many layers as make about so many bytes in bf16."""
    layers = max(round(gigabytes / 0.51), 1)
    model = SIZES | {"num_layers": layers, "num_expert_groups": 1, "num_limited_groups": 1}
    keys = {f"model.{key}": value for key, value in model.items()}
    keys |= {"training.dtype": "bfloat16", "lr_scheduler.warmup_steps": 1}
    if layout == "tp":
        keys |= {"parallelism.tensor_parallel_degree": ranks}
    texts = [f"--{key}={value}" for key, value in keys.items()]
    return load_config(ROOT / "train_configs/debug.toml", texts, ranks)


def write_folder(config: RunConfig, folder: Path) -> None:
    """What the model's sizes ask for, each file written with a hole for its numbers."""
    recipe, kinds = load_recipe(config.model.recipe), {torch.float32: "F32", torch.bfloat16: "BF16"}
    files = plan_files(names_of(recipe, config.model), "bfloat16", SHARD_BYTES)
    for name, file in files.items():
        header, at = {}, 0
        for tensor, (shape, dtype) in file.tensors.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            header[tensor] = {
                "dtype": kinds[dtype],
                "shape": shape,
                "data_offsets": [at, at + size],
            }
            at += size
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
    where = {tensor: name for name, file in files.items() for tensor in file.tensors}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    table = recipe.load_hf()
    content = config_json(table, config.model, dtype="bfloat16", bos=None, eos=None)
    (folder / "config.json").write_text(json.dumps(content))
    total = sum(file.bytes for file in files.values())
    print(f"{total / 1e9:.2f} GB in {len(files)} files")


def measure(rank: int, config: RunConfig, folder: Path, ranks: int) -> None:
    """One rank's import."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.set_num_threads(1)
    world = World.join(Comm())
    recipe = load_recipe(config.model.recipe)
    meshes = Meshes.build(Layout.of(config.parallelism, ranks), "cpu")
    before = _peak()
    read = names_of(recipe, config.model).parts  # as `titan-moe import` does
    engine = parallelize(config, recipe, meshes, world.device, loaded=read)
    built = _peak()
    load_weights(engine.parts, folder, recipe, config.model)
    shards = [getattr(p, "to_local", lambda p=p: p)() for p in engine.parameters()]
    own = sum(local.numel() * local.element_size() for local in shards)
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    facts: list[Any] = gather((rank, _peak() - before, built - before, own))
    if rank == 0:
        print("rank    peak   (built)  shards  largest file  shards + file")
        for number, peak, at_build, own in facts:
            sizes = "  ".join(f"{x / 1e6:7.0f}" for x in (peak, at_build, own, largest))
            verdict = "within" if peak <= own + largest + SLACK else "ABOVE"
            print(f"{number:4d} {sizes}  {(own + largest) / 1e6:7.0f}  {verdict} (MB)")
    world.leave()


def _peak() -> int:
    """Bytes of the largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layout", choices=["fsdp", "tp"], default="fsdp")
    given = parser.parse_args()
    config = config_of(given.gb, given.layout, given.ranks)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(config, Path(folder))
        arguments = (config, Path(folder), given.ranks)
        multiprocessing.spawn(measure, arguments, nprocs=given.ranks)


if __name__ == "__main__":
    main()
