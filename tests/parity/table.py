"""docs/parity.md: what the matrix found, one row per layout.

The rows are held to the matrix by a test, the figures are those of the run that wrote them: other
machines add up in other orders. Remove the file, or change the matrix, and the next whole run of
tests/parity writes it anew.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tests.parity.cases import STEPS, Case
from tests.parity.compare import Comparison, Worst
from tests.tolerances import (
    PARITY_GRADIENT_ERROR,
    PARITY_LATER_GRADIENT_ERROR,
    PARITY_RTOL,
    PARITY_WEIGHT_ERROR,
)

TABLE = Path(__file__).parents[2] / "docs" / "parity.md"

HEAD = f"""\
# Same recipe, same loss, any layout

`tests/parity` trains five tiny models under every layout below and compares each rank's run with
one process that does it by the book: the whole batch at once through a plain model, its losses
written out from their definitions. `deepseek_v3` is the recipe (latent attention, a dense
block, shared experts, grouped sigmoid routing with a moving selection bias), `deepseek_v3_mtp` the
same with two layers of multi-token prediction; `grouped_query` is a family of the tests
(grouped-query attention with normed heads, tied embeddings, softmax routing), `balance_of_groups`
and `balance_of_steps` the same with the other two scopes of the balance loss.

fp32, gloo on CPU, {STEPS} steps of AdamW (eps 1e-5) on rows with documents, padding, uneven numbers
of labels and experts without a token. What may differ, relative to the reference:

| | at most |
|---|---|
| every parameter's gradient (‖Δ‖/‖reference‖), first step | {PARITY_GRADIENT_ERROR:.0e} |
| the same, later steps | {PARITY_LATER_GRADIENT_ERROR:.0e} |
| every weight after the last step (‖Δ‖/‖reference‖) | {PARITY_WEIGHT_ERROR:.0e} |
| loss, balance loss, loss ahead, gradient norm, validation loss | {PARITY_RTOL:.0e} |
| tokens per expert, selection biases | 0 |

A test fails if a layout has no row here, or is beyond these bounds. The figures are those of the
run that wrote this file, other machines add up in other orders; without the file,
`./run_tests.sh --nightly tests/parity` writes it anew. *Worst* is the parameter with the largest
error in the first step.

| layout | processes | first gradients | worst | later | weights | losses, norm | counts, bias |
|---|---|---|---|---|---|---|---|
"""


def write_table(path: Path, results: Iterable[tuple[Case, list[Comparison]]]) -> None:
    rows = [_row(case, comparisons) for case, comparisons in results]
    path.write_text(HEAD + "".join(rows), encoding="utf-8")


def rows_in(path: Path) -> list[tuple[str, int]]:
    """(layout, processes) of each row of the table that is there; none where there is no file."""
    if not path.exists():
        return []
    cells = re.findall(r"^\| ([^|]+: [^|]+) \| (\d+) \|", path.read_text("utf-8"), re.MULTILINE)
    return [(layout, int(processes)) for layout, processes in cells]


def _row(case: Case, comparisons: list[Comparison]) -> str:
    """The worst of all ranks."""
    first = _worst(comparison.first for comparison in comparisons)
    kinds = ("later", "weights", "curves")
    others = [_worst(getattr(comparison, kind) for comparison in comparisons) for kind in kinds]
    errors = " | ".join(f"{worst.error:.1e}" for worst in others)
    return f"| {case} | {case.world} | {first.error:.1e} | `{first.where}` | {errors} | exact |\n"


def _worst(of_ranks: Iterable[Worst]) -> Worst:
    return max(of_ranks, key=lambda worst: worst.error)
