"""The smallest dispatcher of docs/dispatchers.md, as it stands there, on two ranks."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.dispatching import E, Outcome, Visits, dispatcher, spread, visit
from titan_moe.check.pool import Pool
from titan_moe.parallel.dispatch.wire import CountsBytes, Traffic, Wire

PAGE = Path(__file__).parents[2] / "docs/dispatchers.md"
VISITS = Visits(spread([5, 3]))


def class_on_the_page() -> Any:
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
        if "class PrintingDispatcher" in block
    ]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["PrintingDispatcher"]


def both() -> tuple[Outcome, Outcome, str, tuple[Traffic, Traffic]]:
    """Of the page's dispatcher and the flat one; what the first prints; what they send."""
    group = dist.group.WORLD
    assert group is not None
    printing = class_on_the_page()(Wire(group, None, Traffic()), E, forced_balance=False)
    assert isinstance(printing, CountsBytes)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        got = visit(printing, VISITS)
    flat = dispatcher("flat", None)
    expected = visit(flat, VISITS)
    return got, expected, printed.getvalue(), (printing.traffic, flat.traffic)


def test_the_example_does_what_flat_does_and_tells_sizes(pool: Pool) -> None:
    chosen = [expert for tokens in VISITS.ids for choices in tokens for expert in choices]
    for rank, (got, expected, printed, (sent, sent_flat)) in enumerate(pool.run(2, both)):
        assert all(map(torch.equal, got.tensors(), expected.tensors()))
        assert sent == sent_flat
        assert sent.inside > 0
        leave = 2 * len(VISITS.ids[rank])
        arrive = sum(expert // (E // 2) == rank for expert in chosen)
        assert printed == f"rank {rank}: {leave} rows leave, {arrive} arrive\n"
