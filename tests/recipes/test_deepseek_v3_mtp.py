"""Multi-token prediction against transformers' layers of the same weights, and plain autograd."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from recipes.deepseek_v3.model import Model
from tests.layers.helpers import error
from tests.recipes.test_deepseek_v3 import their_model, to_theirs
from tests.recipes.tiny import batch, config, labels_of, whole
from tests.tolerances import FP32_LOGITS, FP32_MODEL_GRADIENT
from titan_moe.layers.mtp import PredictsAhead
from titan_moe.parallel.ahead import labels_ahead

DEPTH, BLOCKS = 2, 4
NAMES = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "project": "eh_proj",
    "output_norm": "post_norm",
}


def with_mtp(**changes: Any) -> Model:
    return whole(config(num_mtp_layers=DEPTH, **changes))


def their_models(ours: Model) -> tuple[DeepseekV3ForCausalLM, MtpModel]:
    """The model, and its layers of multi-token prediction, which number from 0."""
    cfg = config()
    main = whole(cfg)
    of_main = {name: ours.state_dict()[name] for name in main.state_dict()}
    main.load_state_dict(of_main)
    theirs = their_model(cfg, main)
    theirs.config.num_mtp_layers = DEPTH
    ahead = MtpModel(theirs, DEPTH)
    ahead.load_state_dict(ahead_to_theirs(ours.state_dict()), strict=False)
    return theirs, ahead


def ahead_to_theirs(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes of MtpModel, for what its layers have of their own."""
    theirs = {}
    for name, tensor in to_theirs(tensors).items():
        if match := re.match(r"model\.layers\.(\d+)\.(.*)", name):
            layer = int(match[1]) - BLOCKS
            theirs |= {f"layers.{layer}.mtp_block.{match[2]}": tensor} if layer >= 0 else {}
    for name, tensor in tensors.items():
        if (parts := name.split("."))[-2] in NAMES:
            theirs[f"layers.{int(parts[1]) - BLOCKS}.{NAMES[parts[-2]]}.weight"] = tensor
    return theirs


def test_logits_and_gradients_of_every_depth_equal_transformers() -> None:
    ours = with_mtp()
    theirs, ahead = their_models(ours)
    own_names = {name for name, _ in ahead.named_parameters() if name.startswith("layers.")}
    parameters = ahead_to_theirs(dict(ours.named_parameters()))
    assert parameters.keys() == own_names

    inputs = batch()
    tokens_BS = inputs["tokens_BS"]
    seq = tokens_BS.shape[1]
    labels_BSK = labels_ahead(labels_of(tokens_BS), DEPTH)
    hidden = ours(tokens_BS, **inputs, next_tokens_BSM=labels_BSK[:, :, :DEPTH])
    mine = [ours.head.output(normed_BSD) for normed_BSD in hidden.chunk(1 + DEPTH, dim=-1)]

    before_BSD = theirs.model(input_ids=tokens_BS).last_hidden_state
    logits = [theirs.lm_head(before_BSD)]
    for depth in range(DEPTH):
        known = seq - 1 - depth
        before_BSD = ahead.forward_layer(
            depth,
            before_BSD[:, :known],
            torch.arange(known)[None],
            None,
            input_ids=tokens_BS[:, 1 + depth :],
        )
        logits.append(theirs.lm_head(before_BSD))
    for got_BSV, wanted_BSV in zip(mine, logits, strict=True):
        assert (got_BSV[:, : wanted_BSV.shape[1]] - wanted_BSV).abs().max() < FP32_LOGITS

    ours.head.loss(hidden, labels_BSK).backward()
    nats = torch.zeros(())
    for depth, logits_BSV in enumerate(logits):
        labels_BS = labels_BSK[:, : logits_BSV.shape[1], depth]
        nats = nats + torch.nn.functional.cross_entropy(
            logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum", ignore_index=-100
        )
    nats.backward()
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(ours.parameters()))
    of_main = {n: g for n, g in gradients.items() if n.split(".")[1] not in ("4", "5")}
    pairs = [(n, g, theirs.get_parameter(n).grad) for n, g in to_theirs(of_main).items()]
    pairs += [(n, g, ahead.get_parameter(n).grad) for n, g in ahead_to_theirs(gradients).items()]
    for name, gradient, wanted in pairs:
        assert wanted is not None, name
        assert error(gradient, wanted) < FP32_MODEL_GRADIENT, name


def test_what_the_loss_is_worth_and_what_it_pulls() -> None:
    """The value is the main loss alone; gradients have each depth's, by its own scale."""
    ours = with_mtp()
    assert ours.head is not None
    assert ours.head.ahead is not None
    inputs = batch()
    tokens_BS = inputs["tokens_BS"]
    labels_BSK = labels_ahead(labels_of(tokens_BS), DEPTH)

    def gradients(scales: tuple[float, float], factor: float) -> dict[str, Tensor]:
        ours.zero_grad()
        ours.head.ahead.scale_M.copy_(torch.tensor(scales))
        hidden = ours(tokens_BS, **inputs, next_tokens_BSM=labels_BSK[:, :, :DEPTH])
        (ours.head.loss(hidden, labels_BSK) * factor).backward()
        return {n: p.grad.clone() for n, p in ours.named_parameters() if p.grad is not None}

    plain = ours.head.loss(ours(tokens_BS, **inputs), labels_BSK[:, :, 0])
    hidden = ours(tokens_BS, **inputs, next_tokens_BSM=labels_BSK[:, :, :DEPTH])
    assert ours.head.loss(hidden, labels_BSK).item() == pytest.approx(plain.item(), rel=1e-6)

    both, main = gradients((2.0, 3.0), 5.0), gradients((0.0, 0.0), 1.0)
    first, second = gradients((1.0, 0.0), 0.0), gradients((0.0, 1.0), 0.0)
    for name, gradient in both.items():
        wanted = 2 * first[name] + 3 * second[name] + 5 * main[name]
        assert error(gradient, wanted) < FP32_MODEL_GRADIENT, name
    assert not first["layers.5.project.weight"].any()
    assert main["embedding.weight"].any()


def test_nothing_ahead_is_computed_unless_it_is_told() -> None:
    ours, inputs = with_mtp(), batch()
    plain = whole(config())
    plain.load_state_dict({n: ours.state_dict()[n] for n in plain.state_dict()})
    for layer in ours.layers.values():
        if isinstance(layer, PredictsAhead):
            layer.register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    tokens_BS = inputs["tokens_BS"]
    assert torch.equal(ours(tokens_BS, **inputs), plain(tokens_BS, **inputs))


def test_a_token_that_is_not_known_leaves_no_trace() -> None:
    """Neither in another position's prediction nor in the counts of experts."""
    ours, inputs = with_mtp(), batch()
    tokens_BS = inputs["tokens_BS"]
    next_BSM = labels_ahead(labels_of(tokens_BS), DEPTH)[:, :, :DEPTH]
    ours(tokens_BS, **inputs, next_tokens_BSM=next_BSM)
    counts = [int(ours.layers[str(n)].moe.counts.sum()) for n in range(1, BLOCKS + DEPTH)]
    assert counts == [2 * 3 * known for known in (40, 40, 40, 39, 38)]


def test_balance_of_its_layers_comes_last() -> None:
    cfg = config(num_mtp_layers=2, bias_update_rate=[0.1, 0.2, 0.3, 0.4, 0.5])
    assert [cfg.balance(layer).bias_update_rate for layer in range(1, 6)] == cfg.bias_update_rate
    assert config(num_mtp_layers=1, z_loss_weight=0.2).balance(4).z_loss_weight == 0.2
    message = r"has 3 values for 4 MoE layers \(num_layers - num_dense_layers \+ num_mtp_layers\)"
    with pytest.raises(ValueError, match=message):
        config(num_mtp_layers=1, bias_update_rate=[0.1, 0.2, 0.3])


def test_a_weight_of_nothing_is_refused() -> None:
    assert config(num_mtp_layers=1, mtp_loss_weight=0.1).mtp_weight() == 0.1
    with pytest.raises(ValueError, match=r"mtp_loss_weight = 0\.1 weighs nothing, .* is 0"):
        config(mtp_loss_weight=0.1)
