"""The recipe under test, and the tiny run that stands for it.

B rows of a step, S sequence, T tokens, K experts chosen per token.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_moe.check.pool import Pool
from titan_moe.check.tolerances import NEARLY_TIED
from titan_moe.check.values import choices_of, moved, stir
from titan_moe.config.model import ModelConfig
from titan_moe.config.sections import Debug, LrScheduler, RunConfig, Training
from titan_moe.hf_table import OursOnly
from titan_moe.layers.head import IGNORED_LABEL
from titan_moe.parallel.ahead import look_ahead
from titan_moe.parallel.whole import Batch, keywords_of
from titan_moe.recipe import Recipe

ROWS = 8  # on each of four data ranks two, so that micro-batches have one
LEAST_SEQ_LEN = 32
BLOCKS_WITH_EXPERTS = 4  # a pattern that alternates is there twice
SEEDS = 20


@dataclass
class Subject:
    """name: dotted, as in `[model] recipe`. folder: of its files. config: the tiny run's."""

    name: str
    config_file: Path
    folder: Path
    config: RunConfig
    recipe: Recipe
    pool: Pool

    def file(self, name: str) -> str:
        """`recipes/x/model.py`, for a message."""
        path = self.folder / name
        return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model

    def build(self, device: str = "cpu") -> Any:
        """The whole model, its memory not yet initialised."""
        cfg = self.model_config
        with torch.device(device):
            return self.recipe.load_model_class()(
                cfg, layers=range(cfg.num_layers), has_embedding=True, has_head=True
            )

    def stirred(self, seed: int | None = None) -> Any:
        """The whole model with no value left at its first one."""
        model = self.build()
        stir(model, self.seed if seed is None else seed, self.keeps_first_value)
        return model

    @cached_property
    def keeps_first_value(self) -> tuple[str, ...]:
        """Patterns of names that have no place on Hugging Face's side: 0 or 1 is right for them."""
        if self.recipe.hf is None:
            return ()
        rows = [row for row in self.recipe.load_hf().weights if isinstance(row, OursOnly)]
        return tuple(row.ours.replace("{layer}", "*").replace("{mtp}", "*") for row in rows)

    @cached_property
    def seed(self) -> int:
        """Of values with which no token's choice of experts is nearly a tie.

        Else rounding would turn it, and a right recipe would seem wrong.
        """
        for seed in range(SEEDS):
            model = self.stirred(seed).train()
            depth = self.model_config.mtp_depth()
            batches = [look_ahead(batch, depth) for batch in (self.batch, self.plain_batch)]
            steady = [choices_of(model, batch) for batch in batches]
            if all(
                [choices_of(moved(model, NEARLY_TIED, noise), batch) for batch in batches] == steady
                for noise in range(3)
            ):
                return seed
        raise ValueError(f"of {SEEDS} seeds each has a token whose choice of experts nearly ties")

    @cached_property
    def batch(self) -> Batch:
        """A step of B rows: documents of random lengths, padding, another number of labels each."""
        batch = self._tokens(ROWS, seed=1)
        rows, seq_len = batch["tokens"].shape
        generator = torch.Generator().manual_seed(2)
        starts_BS = torch.rand(rows, seq_len, generator=generator) < 0.1
        starts_BS[:, 0] = False
        document_ids_BS = starts_BS.long().cumsum(dim=1)
        index_S = torch.arange(seq_len)
        padding_B = torch.arange(rows) % 4
        document_ids_BS[index_S >= seq_len - padding_B[:, None]] = -1
        begins_BS = torch.where(starts_BS, index_S, 0).cummax(dim=1).values
        is_last_BS = document_ids_BS != document_ids_BS.roll(-1, dims=1)
        is_last_BS[:, -1] = True
        labels_BS = batch["tokens"].roll(-1, dims=1)
        labels_BS[is_last_BS | (document_ids_BS < 0)] = IGNORED_LABEL
        return batch | {
            "labels": labels_BS,
            "positions": index_S - begins_BS,
            "document_ids": document_ids_BS,
        }

    @cached_property
    def plain_batch(self) -> Batch:
        """Two rows of one document each, as any implementation takes them."""
        return self._tokens(2, seed=3)

    def _tokens(self, rows: int, seed: int) -> Batch:
        seq_len = self.config.training.seq_len
        generator = torch.Generator().manual_seed(seed)
        tokens_BS = torch.randint(
            self.model_config.vocab_size, (rows, seq_len), generator=generator
        )
        labels_BS = tokens_BS.roll(-1, dims=1)
        labels_BS[:, -1] = IGNORED_LABEL
        return {
            "tokens": tokens_BS,
            "labels": labels_BS,
            "positions": torch.arange(seq_len).repeat(rows, 1),
            "document_ids": torch.zeros_like(tokens_BS),
        }


def logits_of(model: Any, batch: Batch) -> Tensor:
    """[B, S, V] of our model as it validates: no balance losses, no tokens further ahead."""
    logits_BSV: Tensor = model.head.logits(model(batch["tokens"], **keywords_of(batch)))
    return logits_BSV


def tiny_run(config: RunConfig) -> RunConfig:
    """A step of `config` that takes milliseconds: few blocks, short rows, all else as it is.

    At most one leading dense block and four with experts; rows twice as long as the shortest
    attention window, so that it cuts.
    """
    old = config.model
    dense = min(old.num_dense_layers, 1)
    moe = min(old.num_moe_layers, BLOCKS_WITH_EXPERTS)
    changes: dict[str, Any] = {"num_layers": dense + moe, "num_dense_layers": dense}
    for key, value in old.model_dump().items():
        if isinstance(value, list) and len(value) == old.num_moe_layers + old.mtp_depth():
            changes[key] = value[:moe] + value[old.num_moe_layers :]
    model = type(old).model_validate(old.model_dump(exclude_none=True) | changes)
    windows = [model.attention_shape(layer).window for layer in range(model.num_layers)]
    shortest = min((window for window in windows if window is not None), default=0)
    seq_len = min(max(LEAST_SEQ_LEN, 2 * shortest), model.max_seq_len) // 8 * 8
    if seq_len == 0:
        raise ValueError(f"model.max_seq_len = {model.max_seq_len}: the check needs 8 or more")
    training = Training(
        global_batch_size=ROWS, seq_len=seq_len, steps=1, mixed_precision_param="float32"
    )
    return RunConfig(
        job=config.job,
        model=model,
        training=training,
        optimizer=config.optimizer,
        lr_scheduler=LrScheduler(warmup_steps=0),
        data=config.data.model_copy(update={"num_streams": ROWS}),
        debug=Debug(seed=config.debug.seed),
    )
