"""A DeepSeek-V3 that trains in milliseconds, its batches, and 20 steps of it under any layout.

B rows of a step, S sequence, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.deepseek_v3 import RECIPE
from recipes.deepseek_v3.config import DeepseekV3Config
from titan_moe.config.layout import Layout
from titan_moe.config.sections import (
    ActivationCheckpoint,
    Data,
    Debug,
    Job,
    Optimizer,
    Parallelism,
    RunConfig,
    Source,
    Training,
)
from titan_moe.mesh import Meshes
from titan_moe.optim import build_optimizer
from titan_moe.parallel.engine import Engine
from titan_moe.parallelize import parallelize

ROWS, SEQ_LEN, VOCAB = 16, 8, 48
STEPS = 20
MAX_NORM = 1.0

MODEL = DeepseekV3Config(
    recipe="recipes.deepseek_v3",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=3,
    num_dense_layers=1,
    num_heads=2,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    intermediate_size=40,
    moe_intermediate_size=24,
    num_experts=6,  # no number of ranks above 2 divides it
    top_k=2,
    num_shared_experts=1,
    num_expert_groups=3,
    num_limited_groups=2,
    score_function="sigmoid",
    normalize_weights=True,
    route_scale=1.5,
    balance_loss_weight=[0.05, 0.1],
    z_loss_weight=[0.02, 0.01],
    bias_update_rate=[0.003, 0.001],
    max_seq_len=SEQ_LEN,
    rope_theta=10000.0,
    norm_eps=1e-6,
    initializer_range=0.2,
)


@dataclass(frozen=True)
class Case:
    """One way to lay the same training over processes."""

    shards: int = 1
    replicas: int = 1
    accumulation: int = 1
    recompute: Literal["none", "full"] = "none"
    reshard: Literal["default", "never"] = "default"

    @property
    def world(self) -> int:
        return self.shards * self.replicas

    def __str__(self) -> str:
        kind = f"hsdp {self.replicas}x{self.shards}" if self.replicas > 1 else f"fsdp {self.shards}"
        recompute = ", recomputed" if self.recompute == "full" else ""
        reshard = ", kept after forward" if self.reshard == "never" else ""
        return f"{kind}, accumulation {self.accumulation}{recompute}{reshard}"


@dataclass
class Trace:
    """What a run leaves behind; layouts must agree on all of it.

    loss, balance_loss, norm: one per step. counts: [L, E] per step. gradients: of the first step,
    before clipping, by name. bias: the selection biases [L, E] at the end.
    """

    loss: list[float] = field(default_factory=list)
    balance_loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    bias: Tensor = field(default_factory=lambda: torch.empty(0))


def config_of(case: Case, seed: int, **training: Any) -> RunConfig:
    rows = ROWS // case.world // case.accumulation
    sections = {
        "local_batch_size": rows,
        "global_batch_size": ROWS,
        "seq_len": SEQ_LEN,
        "steps": STEPS,
        "mixed_precision_param": "float32",
    }
    return RunConfig(
        job=Job(name="parity"),
        model=MODEL,
        training=Training(**(sections | training)),
        optimizer=Optimizer(lr=3e-3, eps=1e-5),
        data=Data(
            add_bos=False,
            add_eos=False,
            num_streams=ROWS,
            sources=[Source(name="none", path="none")],
        ),
        parallelism=Parallelism(
            data_parallel_replicate_degree=case.replicas,
            data_parallel_shard_degree=case.shards,
            fsdp_reshard_after_forward=case.reshard,
        ),
        activation_checkpoint=ActivationCheckpoint(mode=case.recompute),
        debug=Debug(seed=seed),
    )


def batch_of_step(step: int) -> dict[str, Tensor]:
    """All B rows: documents of random lengths, rows padded by 0 to 3 positions, row 5 wholly.

    Labels are the document's next token; each rank and micro-batch has another number of them.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens_BS = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
    starts_BS = torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.2
    starts_BS[:, 0] = False
    document_ids_BS = starts_BS.long().cumsum(dim=1)
    padding_B = torch.arange(ROWS) % 4
    padding_B[5] = SEQ_LEN
    index_S = torch.arange(SEQ_LEN)
    document_ids_BS[index_S >= SEQ_LEN - padding_B[:, None]] = -1
    positions_BS = torch.zeros_like(tokens_BS)
    labels_BS = torch.full_like(tokens_BS, -100)
    for row in range(ROWS):
        for s in range(SEQ_LEN - 1):
            if document_ids_BS[row, s] == document_ids_BS[row, s + 1]:
                positions_BS[row, s + 1] = positions_BS[row, s] + 1
                if document_ids_BS[row, s] >= 0:
                    labels_BS[row, s] = tokens_BS[row, s + 1]
    return {
        "tokens": tokens_BS,
        "labels": labels_BS,
        "positions": positions_BS,
        "document_ids": document_ids_BS,
    }


def rows_of(batch: dict[str, Tensor], meshes: Meshes) -> dict[str, Tensor]:
    """This rank's share."""
    rows = len(batch["tokens"]) // meshes.dp_degree
    begin = meshes.dp_rank * rows
    return {key: value[begin : begin + rows] for key, value in batch.items()}


def build(case: Case, seed: int, **training: Any) -> tuple[Engine, Meshes]:
    config = config_of(case, seed, **training)
    meshes = Meshes.build(Layout.of(config.parallelism, case.world), "cpu")
    return parallelize(config, RECIPE, meshes, torch.device("cpu"), poison=True), meshes


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = whole(parameter.grad)
    return gradients


def train(
    case: Case, seed: int, steps: int = STEPS, break_it: Callable[[Engine], None] | None = None
) -> Trace:
    """Train as the loop does. break_it: a control that must make the comparison fail."""
    engine, meshes = build(case, seed)
    if break_it:
        break_it(engine)
    config = config_of(case, seed)
    optimizer = build_optimizer(engine.parts, config.optimizer)
    trace = Trace()
    for step in range(steps):
        optimizer.zero_grad()
        output = engine.forward_backward(rows_of(batch_of_step(step), meshes))
        if step == 0:
            trace.gradients = gradients_of(engine.parts[0])
        norm = engine.grad_norm()
        engine.clip_grads(norm, MAX_NORM)
        optimizer.step()
        trace.counts.append(engine.update_routers())
        trace.loss.append(output.loss.item())
        trace.balance_loss.append(output.balance_loss.item())
        trace.norm.append(norm.item())
    trace.bias = torch.stack(
        [b for name, b in engine.parts[0].named_buffers() if name.endswith("selection_bias")]
    )
    return trace
