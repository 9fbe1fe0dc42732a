"""A family's tiny model and transformers' model of the same weights.

Weights and config.json reach the other side by the family's own table (`hf.py`), read here in the
plainest way; what transformers makes of the names is transformers' own. So a row that is wrong in
the table shows as a wrong logit, as a weight that is missing, or as one too many.

B batch, S sequence, V vocabulary.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from tests.layers.helpers import error, fill
from tests.recipes.tiny import labels_of
from tests.tolerances import FP32_LOGITS, FP32_MODEL_GRADIENT
from titan_moe.config.model import ModelConfig
from titan_moe.hf_table import Copy, HuggingFace, OursOnly, Weight
from titan_moe.layers.moe import MoE
from titan_moe.recipe import load_recipe

Values = dict[str, Tensor]

ROWS, SEQ_LEN = 2, 40
PIECES = ((0, 11), (11, 30), (30, 40))


def their_config(cfg: ModelConfig) -> PreTrainedConfig:
    """What `config.json` would say, by the table's keys."""
    table = load_recipe(cfg.recipe).load_hf()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling:
        keys = cfg.rope_scaling.model_dump()
        rope |= {"rope_type": keys.pop("type")}
        rope |= {"original_max_position_embeddings": keys.pop("original_max_seq_len"), **keys}
    sizes = {theirs: getattr(cfg, ours) for ours, theirs in table.keys.items()}
    sizes |= {
        table.keys[ours]: None for ours, null in table.nulls.items() if getattr(cfg, ours) == null
    }
    return AutoConfig.for_model(
        table.model_type,
        **{**sizes, **table.fixed, **table.derived(cfg), "rope_parameters": rope},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def to_theirs(tensors: Values, table: HuggingFace) -> Values:
    """The published names and shapes of our tensors. Fails where a name fits no row."""
    theirs: Values = {}
    for name, tensor in tensors.items():
        rows = [(row, found) for row in table.weights if (found := _fit(row, name))]
        assert rows, f"no row of the table for {name}"
        for row, found in rows:
            if isinstance(row, Weight) and row.every:
                _put(theirs, row.theirs.format(**found.groupdict()), row.every, tensor)
            elif isinstance(row, Weight):
                theirs |= _of_row(row, found, tensor)
            elif isinstance(row, Copy) and "{mtp}" not in row.theirs:  # they have none of it
                theirs[row.theirs.format(**found.groupdict())] = tensor
            elif isinstance(row, OursOnly) and row.must_be_zero:
                assert not tensor.any(), name
    return theirs


def _fit(row: Any, name: str) -> re.Match[str] | None:
    if not hasattr(row, "ours"):
        return None
    pattern = re.escape(row.ours).replace(r"\{layer\}", r"(?P<layer>\d+)")
    return re.fullmatch(pattern.replace(r"\{mtp\}", r"(?P<mtp>\d+)"), name)


def _of_row(row: Weight, found: re.Match[str], tensor: Tensor) -> Values:
    if row.transposed:
        tensor = tensor.transpose(-1, -2)
    if "{expert}" not in row.theirs:
        return {row.theirs.format(**found.groupdict()): tensor}
    return {
        row.theirs.format(**found.groupdict(), expert=expert): of_expert
        for expert, of_expert in enumerate(tensor)
    }


def _put(theirs: Values, name: str, every: tuple[int, int], tensor: Tensor) -> None:
    """Where ours are some of the entries along their last dimension, and other rows' the rest."""
    first, step = every
    if name not in theirs:
        theirs[name] = tensor.new_full((*tensor.shape[:-1], step * tensor.shape[-1]), torch.nan)
    theirs[name][..., first::step] = tensor


def tiny(cfg: ModelConfig) -> Any:
    """All layers, with norms, biases and sinks unlike their first values."""
    model = fill(
        load_recipe(cfg.recipe).load_model_class()(
            cfg, layers=range(cfg.num_layers), has_embedding=True, has_head=True
        )
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif "bias" in name or name.endswith("sinks_H"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        rows = load_recipe(cfg.recipe).load_hf().weights
        if any(isinstance(row, Weight) and "selection_bias" in row.ours for row in rows):
            for name, buffer in model.named_buffers():
                if name.endswith("selection_bias"):
                    buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def their_model(cfg: ModelConfig, ours: nn.Module) -> Any:
    """transformers loads what the table makes of our weights: none missing, none too many."""
    table = load_recipe(cfg.recipe).load_hf()
    theirs, info = getattr(transformers, table.architecture).from_pretrained(
        None,
        config=their_config(cfg),
        state_dict=to_theirs(dict(ours.state_dict()), table),
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(info.values()), info
    return theirs


@dataclass
class Pair:
    """Both models of one config, and the tokens they are given."""

    cfg: ModelConfig
    ours: Any
    theirs: Any
    tokens_BS: Tensor


def pair(cfg: ModelConfig) -> Pair:
    ours = tiny(cfg)
    tokens_BS = torch.randint(
        cfg.vocab_size, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(6)
    )
    return Pair(cfg, ours, their_model(cfg, ours), tokens_BS)


def inputs_of(tokens_BS: Tensor) -> Values:
    """One document per row."""
    return {
        "positions_BS": torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS),
        "document_ids_BS": torch.zeros_like(tokens_BS),
        "tokens_BS": tokens_BS,
    }


def check_logits_and_gradients(models: Pair) -> None:
    """Logits, and the gradient of every parameter. No MoE layer's routing is even."""
    ours, theirs, tokens_BS = models.ours, models.theirs, models.tokens_BS
    labels_BS = labels_of(tokens_BS)
    hidden_BSD = ours(tokens_BS, **inputs_of(tokens_BS))
    for module in ours.modules():
        if isinstance(module, MoE):
            counts = module.counts.double()
            assert counts.std() > 0.1 * counts.mean(), "routing is nearly even: nothing is shown"
    logits_BSV = theirs(input_ids=tokens_BS).logits
    assert logits_BSV.std() > 0.3, "logits are too small for the tolerance to mean anything"
    assert (ours.head.logits(hidden_BSD) - logits_BSV).abs().max() < FP32_LOGITS

    ours.head.loss(hidden_BSD, labels_BS).backward()
    cross_entropy = nn.functional.cross_entropy
    cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum").backward()
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(ours.parameters()))
    table = load_recipe(models.cfg.recipe).load_hf()
    got, wanted = to_theirs(gradients, table), their_gradients(theirs)
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    for name, reference in wanted.items():
        assert error(got[name], reference) < FP32_MODEL_GRADIENT, name


def their_gradients(theirs: Any) -> Values:
    """By the names under which transformers saves the weights."""
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return dict(revert_weight_conversion(theirs, gradients))


def check_packed_documents(models: Pair) -> None:
    """Each of the documents that share a row, the last of them padding, equals itself alone."""
    ours, theirs, tokens_BS = models.ours.eval(), models.theirs.eval(), models.tokens_BS
    inputs = inputs_of(tokens_BS)
    inputs["positions_BS"] = inputs["positions_BS"].clone()
    for number, (start, stop) in enumerate(PIECES):
        inputs["document_ids_BS"][:, start:stop] = number
        inputs["positions_BS"][:, start:stop] = torch.arange(stop - start)
    inputs["document_ids_BS"][:, PIECES[-1][0] :] = -1  # computed, like any other
    hidden_BSD = ours(tokens_BS, **inputs)
    alone = [theirs(input_ids=tokens_BS[:, start:stop]).logits for start, stop in PIECES]
    assert (ours.head.logits(hidden_BSD) - torch.cat(alone, dim=1)).abs().max() < FP32_LOGITS


def check_names(models: Pair, folder: Path) -> None:
    """Names and shapes that transformers' save_pretrained writes are the table's."""
    models.theirs.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    table = load_recipe(models.cfg.recipe).load_hf()
    ours = to_theirs(dict(models.ours.state_dict()), table)
    assert saved.keys() == ours.keys(), saved.keys() ^ ours.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, ours[name]), name
