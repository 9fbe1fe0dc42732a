"""Names are the plain model's, state is complete, and nothing moves while it is read."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.checkpoint.stand_in import Model, Run, assert_same
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.state import model_tensors, optimizer_tensors
from titan_moe.config.sections import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PARAMETERS = {
    "embedding.weight",
    *(f"layers.{n}.{leaf}" for n in (0, 1) for leaf in ("router.weight", "experts", "norm.weight")),
}
BUFFERS = {
    f"layers.{n}.{leaf}" for n in (0, 1) for leaf in ("router.selection_bias", "previous_counts")
}


def test_what_is_in_a_checkpoint(tmp_path: Path) -> None:
    Run(tmp_path).train().save()
    stored = FileSystemReader(tmp_path / "step-1").read_metadata().state_dict_metadata
    assert set(stored) == {f"model.{name}" for name in PARAMETERS | BUFFERS} | {
        f"optimizer.{entry}.{name}"
        for entry in ("exp_avg", "exp_avg_sq", "step")
        for name in PARAMETERS
    }


def wrapped() -> Model:
    model = Model()
    for name, block in model.layers.items():
        model.layers[name] = torch.compile(checkpoint_wrapper(block))
    model.layers["0"]._orig_mod._checkpoint_wrapped_module.router = torch.compile(
        model.layers["0"]._orig_mod._checkpoint_wrapped_module.router
    )
    return model


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method")
def test_wrappers_leave_no_trace(tmp_path: Path) -> None:
    plain = Run(tmp_path).train(2).save()
    model = wrapped()
    assert "layers.0._orig_mod" in " ".join(name for name, _ in model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    assert model_tensors([model]).keys() == model_tensors([plain.model]).keys()
    assert Checkpointer(tmp_path, Checkpoint(), [model], optimizer).load()
    assert_same(
        {name: tensor.detach() for name, tensor in model_tensors([model]).items()},
        {name: tensor.detach() for name, tensor in model_tensors([plain.model]).items()},
    )
    assert_same(
        optimizer_tensors([model], optimizer),
        optimizer_tensors([plain.model], plain.optimizer),
    )


def test_groups_and_their_order_do_not_matter(tmp_path: Path) -> None:
    plain = Run(tmp_path).train(2).save()
    run = Run(tmp_path, seed=1)
    parameters = dict(run.model.named_parameters())
    order = sorted(parameters, reverse=True)
    run.optimizer = torch.optim.AdamW(
        [{"params": [parameters[name]], "weight_decay": 0.1, "lr": 0.1} for name in order]
    )
    run.checkpointer.optimizer = run.optimizer
    run.load()
    assert_same(run.values(), plain.values())
    assert_same(run.train().values(), plain.train().values())


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_state_from_nothing_is_what_the_optimizer_would_make(implementation: str) -> None:
    def trained(read_state_first: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{implementation: True})
        if read_state_first:
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            optimizer_tensors([model], optimizer)
            assert_same(model.state_dict(), before)
        for parameter in model.parameters():
            parameter.grad = torch.cos(parameter.detach())
        optimizer.step()
        return {**model.state_dict(), **optimizer_tensors([model], optimizer)}

    assert_same(trained(True), trained(False))


def test_a_parameter_that_never_had_a_gradient(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first, *others = run.model.parameters()
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    assert first not in run.optimizer.state
    run.step = 1
    run.save()
    again = Run(tmp_path, seed=1)
    again.load()
    assert_same(again.values(), run.values())
    assert again.optimizer.state[next(again.model.parameters())]["step"] == 0


def test_bits_of_buffers_and_of_a_bfloat16_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = Run(tmp_path)
    run.model.embedding.bfloat16()
    with torch.no_grad():
        run.model.layers["0"].router.selection_bias[:] = torch.tensor([0.123456, -0.0, 1e-42])
    run.train(1).save()
    again = Run(tmp_path, seed=1)
    again.model.embedding.bfloat16()
    again.load()
    assert_same(again.values(), run.values())
    bias = again.model.layers["0"].router.selection_bias
    assert bias.dtype == torch.float32
    expected = run.model.layers["0"].router.selection_bias.view(torch.int32)
    assert torch.equal(bias.view(torch.int32), expected)
    assert again.model.layers["1"].previous_counts.tolist() == [40840, 40841, 2]


def test_several_parts(tmp_path: Path) -> None:
    whole = Run(tmp_path).train().save()
    other = Run(tmp_path, seed=1)
    parts = [
        torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({n: block})})
        for n, block in other.model.layers.items()
    ] + [torch.nn.ModuleDict({"embedding": other.model.embedding})]
    Checkpointer(tmp_path, Checkpoint(), parts, other.optimizer).load()
    assert_same(other.values(), whole.values())


def test_an_unknown_optimizer_is_refused(tmp_path: Path) -> None:
    model = Model()
    run = Checkpointer(tmp_path, Checkpoint(), [model], torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="do not know the state of SGD"):
        run.save(1, {})


class Tied(nn.Module):
    """An end of a model: its embedding's weight, which the output shares where there is one."""

    def __init__(self, seed: int, has_head: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        if has_head:
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight


def both_ends(folder: Path, seed: int) -> tuple[list[Tied], torch.optim.Optimizer, Checkpointer]:
    """First and last stage on one rank: two parameters, equal in value, of one name."""
    ends = [Tied(seed, has_head=False), Tied(seed, has_head=True)]
    optimizer = torch.optim.AdamW([end.embedding.weight for end in ends], lr=0.1)
    for end in ends:
        end.embedding.weight.grad = torch.full((5, 3), float(seed))
    optimizer.step()
    return ends, optimizer, Checkpointer(folder, Checkpoint(), list(ends), optimizer)


def test_a_weight_that_two_parts_hold_is_saved_once_and_loaded_into_both(tmp_path: Path) -> None:
    ends, optimizer, checkpointer = both_ends(tmp_path, seed=1)
    checkpointer.save(1, {})
    stored = FileSystemReader(tmp_path / "step-1").read_metadata().state_dict_metadata
    entries = ("exp_avg", "exp_avg_sq", "step")
    assert set(stored) == {
        "model.embedding.weight",
        *(f"optimizer.{entry}.embedding.weight" for entry in entries),
    }

    others, other_optimizer, other_checkpointer = both_ends(tmp_path, seed=2)
    assert not torch.equal(others[0].embedding.weight, ends[0].embedding.weight)
    assert other_checkpointer.load()
    for end in others:
        assert torch.equal(end.embedding.weight, ends[0].embedding.weight)
        for entry in entries:
            wanted = optimizer.state[ends[0].embedding.weight][entry]
            assert torch.equal(other_optimizer.state[end.embedding.weight][entry], wanted), entry

    weights_only, _, loader = both_ends(tmp_path / "new", seed=3)
    loader.load_weights(tmp_path / "step-1")
    for end in weights_only:
        assert torch.equal(end.embedding.weight, ends[0].embedding.weight)
