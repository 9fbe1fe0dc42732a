"""What tensor parallelism makes of a model, without FSDP around it, against one process."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from recipes.deepseek_v3.config import DeepseekV3Config
from recipes.deepseek_v3.model import Model
from recipes.deepseek_v3.sharding import SHARDING
from tests.recipes import tiny
from tests.tolerances import FP32_LOGITS, FP32_MODEL_GRADIENT
from titan_moe.check.pool import Pool
from titan_moe.config.layout import Layout
from titan_moe.config.sections import Parallelism
from titan_moe.mesh import Meshes
from titan_moe.parallel import collectives
from titan_moe.parallel.balance import apply_sequence_balance
from titan_moe.parallel.initialise import initialise, materialise
from titan_moe.parallel.local import partial_parameters
from titan_moe.parallel.tensor import apply_tensor_parallel
from titan_moe.recipe import Sharding

DIRECT_QUERIES = tiny.config(q_lora_rank=0, balance_loss_weight=0.1, z_loss_weight=0.1)
LATENT_QUERIES = tiny.config(balance_loss_weight=0.1, z_loss_weight=0.1)


def build(cfg: DeepseekV3Config, tp: int, sharding: Sharding = SHARDING, **section: Any) -> Any:
    with torch.device("meta"):
        model = Model(cfg, layers=range(cfg.num_layers), has_embedding=True, has_head=True)
    if tp > 1:
        meshes = Meshes.build(Layout(tp=tp), "cpu")
        apply_tensor_parallel(model, meshes, sharding, Parallelism(**section))
        apply_sequence_balance(model, meshes, sharding, Parallelism(**section))
    materialise(model, torch.device("cpu"), poison=True)
    initialise(model, 0)
    return model


def logits_and_gradients(
    cfg: DeepseekV3Config, tp: int, section: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss, and every whole gradient of loss and balance losses."""
    model, batch = build(cfg, tp, **section), tiny.batch()
    batch["document_ids_BS"][0, -5:] = -1  # padding, which balance must not see
    hidden = model(batch["tokens_BS"], **batch)
    logits = model.head.logits(hidden)
    loss = model.head.loss(hidden, tiny.labels_of(batch["tokens_BS"]))
    loss.backward()
    partial = set(partial_parameters(model))
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        if parameter in partial or (tp > 1 and ".experts." in name):
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local)
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return logits.detach(), loss.detach(), gradients


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("cfg", [DIRECT_QUERIES, LATENT_QUERIES], ids=["direct", "latent"])
def test_logits_and_every_gradient(
    pool: Pool, cfg: DeepseekV3Config, sequence_parallel: bool, tp: int
) -> None:
    expected = logits_and_gradients(cfg, 1, {})
    section = {"sequence_parallel": sequence_parallel}
    for logits, loss, gradients in pool.run(tp, logits_and_gradients, cfg, tp, section):
        torch.testing.assert_close(logits, expected[0], rtol=0, atol=FP32_LOGITS)
        torch.testing.assert_close(loss, expected[1], rtol=1e-6, atol=0)
        assert gradients.keys() == expected[2].keys()
        for name, gradient in expected[2].items():
            error = (gradients[name] - gradient).norm() / gradient.norm()
            assert error < FP32_MODEL_GRADIENT, f"{name}: {error:.1e}"


def partial_names(sequence_parallel: bool) -> set[str]:
    model = build(LATENT_QUERIES, 2, sequence_parallel=sequence_parallel)
    partial = set(partial_parameters(model))
    return {name for name, p in model.named_parameters() if p in partial}


def test_which_gradients_are_shares(pool: Pool) -> None:
    """By hand: what sees other tokens on each rank, or the gradients of other heads."""
    latents = {"attention.q_norm.weight", "attention.kv_norm.weight"}
    residual = {"attention_norm.weight", "mlp_norm.weight"}
    downs = {"attention.q_down.weight", "attention.kv_down.weight"}
    router = {"moe.router.weight"}

    def of_layers(always: set[str], of_moe: set[str]) -> set[str]:
        names = {f"layers.{layer}.{name}" for layer in range(4) for name in always}
        return names | {f"layers.{layer}.{name}" for layer in range(1, 4) for name in of_moe}

    for names in pool.run(2, partial_names, False):
        assert names == of_layers(latents, router)
    for names in pool.run(2, partial_names, True):
        assert names == of_layers(latents | residual | downs, router) | {"head.norm.weight"}


def gathered_widths(cfg: DeepseekV3Config) -> list[int]:
    model, batch, widths = build(cfg, 2), tiny.batch(), []
    gather = collectives.gather_slices

    def count(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        widths.append(x.shape[-1])
        return gather(x, dim, group)

    collectives.gather_slices = count
    try:
        model(batch["tokens_BS"], **batch)
    finally:
        collectives.gather_slices = gather
    return widths


def test_attention_gathers_latents(pool: Pool) -> None:
    """Per block: latents of queries, of keys with the rotary key, and the MLP's hidden tokens."""
    cfg = LATENT_QUERIES
    keys = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    for widths in pool.run(2, gathered_widths, cfg):
        assert widths == [cfg.q_lora_rank, keys, cfg.hidden_size] * cfg.num_layers
    for widths in pool.run(2, gathered_widths, DIRECT_QUERIES):
        assert widths == [cfg.hidden_size, keys, cfg.hidden_size] * cfg.num_layers


def refuse(cfg: DeepseekV3Config, sharding: Sharding) -> None:
    build(cfg, 2, sharding)


@pytest.mark.parametrize(
    ("cfg", "sharding", "message"),
    [
        (
            tiny.config(intermediate_size=63),
            SHARDING,
            "tensor_parallel_degree = 2: layers.0.mlp.gate.weight: 63 along dimension 0 cannot be "
            "split over 2 ranks",
        ),
        (
            tiny.config(vocab_size=97),
            SHARDING,
            "tensor_parallel_degree = 2: embedding.weight: 97 along dimension 0 cannot",
        ),
        (LATENT_QUERIES, replace(SHARDING, rowwise=()), "rowwise names nothing in the model"),
        (
            LATENT_QUERIES,
            replace(SHARDING, gather_inputs=("layers.*.attention.q", "layers.*.mlp")),
            "layers.1.moe.shared is split, but sharding.gather_inputs",
        ),
    ],
)
def test_refused(pool: Pool, cfg: DeepseekV3Config, sharding: Sharding, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool.run(2, refuse, cfg, sharding)


def log_lines() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("titan_moe.parallel.tensor")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    build(LATENT_QUERIES, 2)
    logger.removeHandler(handler)
    return lines


def test_it_says_what_it_touched(pool: Pool) -> None:
    """Four attentions, one dense MLP, three shared ones: 3 and 3 linears each; and two tables."""
    assert pool.run(2, log_lines)[0] == [
        "tensor parallel: 8 attentions and MLPs, 26 weights over 2 ranks, sequence parallel on"
    ]
