"""The tests' own family is what it says: tied over parts, normed heads, sizes that are its own."""

import pytest
import torch
from pydantic import ValidationError

from tests.families.grouped_query.model import Model
from tests.parity.tiny import GROUPED_QUERY
from titan_moe.parallel.initialise import initialise


def part(layers: range, has_embedding: bool, has_head: bool) -> Model:
    model = Model(GROUPED_QUERY, layers=layers, has_embedding=has_embedding, has_head=has_head)
    initialise(model, 0)
    return model


def test_first_and_last_part_hold_one_weight_under_one_name() -> None:
    first, middle, last = (
        part(range(1), True, False),
        part(range(1, 3), False, False),
        part(range(3, 4), False, True),
    )
    names = [dict(model.named_parameters()) for model in (first, middle, last)]
    assert torch.equal(names[0]["embedding.weight"], names[2]["embedding.weight"])
    assert "embedding.weight" not in names[1]
    assert last.head is not None
    assert last.head.output.weight is names[2]["embedding.weight"]
    whole = dict(part(range(4), True, True).named_parameters())
    assert set().union(*names) == whole.keys()


def test_attention_shape_counts_the_projections() -> None:
    attention = part(range(1), True, False).layers["0"].attention
    weights = sum(p.numel() for p in attention.parameters() if p.ndim == 2)
    assert GROUPED_QUERY.attention_shape(0).projection_params == weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads = 8 is not divisible by num_kv_heads = 3"),
        (
            {"num_shared_experts": 1},
            "num_shared_experts = 1: this family has experts in",
        ),
    ],
)
def test_sizes_that_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        type(GROUPED_QUERY).model_validate(GROUPED_QUERY.model_dump() | change)
