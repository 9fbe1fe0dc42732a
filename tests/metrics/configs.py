"""A whole run's config, as small as the types allow."""

from dataclasses import dataclass
from typing import Any

import torch

from titan_moe.config import RunConfig
from titan_moe.config.model import AttentionShape, ModelConfig
from titan_moe.config.sections import Data, Job, Metrics, Optimizer, Source, Training

CPU = torch.device("cpu")


class TinyConfig(ModelConfig):
    num_kv_heads: int = 1

    def attention_shape(self, layer: int) -> AttentionShape:
        return AttentionShape(4 * self.hidden_size * self.hidden_size, self.num_heads, 2, 2)


@dataclass(frozen=True)
class Place:
    """One process of several."""

    rank: int = 0
    size: int = 2
    device: torch.device = CPU


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """`run_config(training={"seq_len": 16})`: the tiny config with some keys changed."""
    model = {
        "recipe": "recipes.tiny",
        "vocab_size": 11,
        "hidden_size": 4,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 6,
        "moe_intermediate_size": 3,
        "num_experts": 4,
        "top_k": 2,
        "max_seq_len": 8,
        "rope_theta": 1e4,
        "norm_eps": 1e-6,
        "initializer_range": 0.02,
    }
    training = {"local_batch_size": 2, "global_batch_size": 4, "seq_len": 8, "steps": 20}
    data = {
        "add_bos": True,
        "add_eos": False,
        "num_streams": 4,
        "sources": [Source(name="a", path="a.jsonl")],
    }
    return RunConfig(
        job=Job(**{"name": "tiny"} | sections.pop("job", {})),
        model=TinyConfig(**model | sections.pop("model", {})),
        training=Training(**training | sections.pop("training", {})),
        optimizer=Optimizer(lr=1e-3),
        data=Data(**data | sections.pop("data", {})),
        metrics=Metrics(**sections.pop("metrics", {})),
        **{
            name: RunConfig.model_fields[name].annotation(**keys) for name, keys in sections.items()
        },
    )
