"""Where log messages go: rank 0 speaks to the terminal, the others only to complain. No torch."""

import logging
import sys
from pathlib import Path

_OURS = "titan-moe"  # name of our handlers, so that a second call replaces just them


def setup_logging(rank: int, logs_folder: Path | None = None) -> None:
    """Route messages of this process; may be called again, e.g. once the run folder is known.

    Rank 0 prints everything from INFO on to standard output; other ranks print warnings and errors
    to standard error, marked with their rank. With `logs_folder`, every rank also writes
    rank<r>.log there, with times and from DEBUG on. Other packages are heard from WARNING on.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == _OURS]:
        root.removeHandler(handler)
        handler.close()

    terminal = logging.StreamHandler(sys.stdout if rank == 0 else sys.stderr)
    terminal.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    mark = "" if rank == 0 else f"[rank {rank}] "
    terminal.setFormatter(logging.Formatter(f"{mark}%(message)s"))
    handlers: list[logging.Handler] = [terminal]
    if logs_folder is not None:
        logs_folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(logs_folder / f"rank{rank}.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    for handler in handlers:
        handler.set_name(_OURS)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for ours in ("titan_moe", "__main__"):  # the loop is __main__ under `torchrun -m`
        logging.getLogger(ours).setLevel(logging.DEBUG)
