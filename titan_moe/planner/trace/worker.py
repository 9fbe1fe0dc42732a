"""A process that traces some pipeline ranks: `python -m titan_moe.planner.trace.worker FILE`.

FILE holds the pickled question, and in its place afterwards the answer: traces, or what a user can
mend, as text.
"""

import pickle
import sys
from pathlib import Path

import torch

from titan_moe.planner.trace.rank import RankTrace, trace_rank


def main(path: Path) -> None:
    torch.set_num_threads(1)
    case, ranks, kernel = pickle.loads(path.read_bytes())
    answer: list[RankTrace] | str
    try:
        answer = [trace_rank(case, rank, kernel) for rank in ranks]
    except ValueError as error:
        answer = str(error)
    path.write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
