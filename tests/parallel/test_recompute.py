"""A recomputed block: the same gradients, names and counts, and never another choice of experts."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from recipes.deepseek_v3.model import Model
from tests.parity.run import gradients_of
from tests.parity.tiny import MODEL, batch_of_step
from titan_moe.config.sections import ActivationCheckpoint
from titan_moe.layers.moe import MoE
from titan_moe.parallel.initialise import initialise
from titan_moe.passes import recompute
from titan_moe.passes.recompute import apply_activation_checkpoint

Mode = Literal["none", "full"]


def model_with(mode: Mode, splits_backward: bool = False) -> Model:
    model = Model(MODEL, layers=range(MODEL.num_layers), has_embedding=True, has_head=True)
    initialise(model, 0)
    section = ActivationCheckpoint(mode=mode)
    apply_activation_checkpoint(model, section, splits_backward=splits_backward)
    return model


def loss_of(model: Model) -> Tensor:
    batch = batch_of_step(0)
    hidden_BSD = model(
        batch["tokens"],
        positions_BS=batch["positions"],
        document_ids_BS=batch["document_ids"],
        tokens_BS=batch["tokens"],
    )
    return model.head.loss(hidden_BSD, batch["labels"])


def moes(model: Model) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@pytest.mark.parametrize("splits_backward", [False, True])
def test_gradients_counts_and_names_are_those_without(splits_backward: bool) -> None:
    plain, recomputed = model_with("none"), model_with("full", splits_backward)
    for model in (plain, recomputed):
        loss_of(model).backward()
    assert plain.state_dict().keys() == recomputed.state_dict().keys()
    for name, gradient in gradients_of(plain).items():
        assert torch.equal(gradients_of(recomputed)[name], gradient), name
    valid_tokens = int((batch_of_step(0)["document_ids"] >= 0).sum())
    for moe, other in zip(moes(plain), moes(recomputed), strict=True):
        assert int(moe.counts.sum()) == valid_tokens * MODEL.top_k
        assert torch.equal(moe.counts, other.counts)
        assert torch.equal(moe.balance_loss_sum, other.balance_loss_sum)
        assert float(moe.balance_loss_sum) > 0.0


@pytest.mark.parametrize("splits_backward", [False, True])
def test_the_choice_of_experts_is_kept(splits_backward: bool) -> None:
    """A bias that changes between forward and backward would send every token elsewhere."""
    expected, model = model_with("full"), model_with("full", splits_backward)
    loss_of(expected).backward()
    loss = loss_of(model)
    for moe in moes(model):
        moe.router.selection_bias.copy_(torch.linspace(5.0, -5.0, MODEL.num_experts))
    loss.backward()
    for name, gradient in gradients_of(expected).items():
        assert torch.equal(gradients_of(model)[name], gradient), name


def test_without_keeping_it_every_token_would_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: what this file asserts does depend on what is kept."""
    plain, broken = model_with("none"), model_with("full")
    loss_of(plain).backward()
    monkeypatch.setattr(recompute, "ROUTING_OPS", ())
    loss_of(broken).backward()
    for moe, other in zip(moes(plain), moes(broken), strict=True):
        assert torch.equal(other.counts, 2 * moe.counts)


def test_backward_may_recompute_more_than_once() -> None:
    model = model_with("full")
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    once, counts = gradients_of(model), [moe.counts.clone() for moe in moes(model)]
    model.zero_grad()
    loss.backward()
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, once[name]), name
    assert all(torch.equal(moe.counts, c) for moe, c in zip(moes(model), counts, strict=True))


@pytest.mark.parametrize(("splits_backward", "runs"), [(True, 2), (False, None)])
def test_backward_in_many_calls_runs_a_block_again_once(
    splits_backward: bool, runs: int | None
) -> None:
    """A call of autograd per weight, as schedules that split backward make; without, a control."""
    plain, model = model_with("none"), model_with("full", splits_backward)
    loss_of(plain).backward()
    expected = gradients_of(plain)
    count = 0

    def counted(module: nn.Module, inputs: object) -> None:
        nonlocal count
        count += 1

    model.layers["2"].attention_norm.register_forward_pre_hook(counted)
    loss = loss_of(model)
    assert count == 1
    for name, parameter in model.named_parameters():
        (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        assert torch.equal(gradient, expected[name]), name
    assert (count == runs) if runs else (count > 10)
    for moe, other in zip(moes(plain), moes(model), strict=True):
        assert torch.equal(moe.counts, other.counts)


def test_block_insides_are_not_kept() -> None:
    """Bytes that autograd holds on to between forward and backward."""

    def kept(mode: Mode, splits_backward: bool = False) -> int:
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = model_with(mode, splits_backward)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_of(model)
        return sum(size for pointer, size in held.items() if pointer not in weights)

    assert kept("full") < 0.5 * kept("none")
    assert kept("full", splits_backward=True) < 0.5 * kept("none")
