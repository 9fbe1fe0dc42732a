"""Peak memory of the data path on a small and on a large corpus.

    python -m benchmarks.data_memory [--megabytes 2000] [--seq-len 4096] [--num-streams 16]

Each corpus is written to a temporary folder, piece by piece, and read to its end by the loader in a
process of its own, whose peak resident memory is printed.
"""

import argparse
import json
import random
import resource
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL_MEGABYTES = 20
BATCH = 16


def write_jsonl(path: Path, num_bytes: int) -> None:
    """Documents of 100 bytes to 100 kB, short ones far more often, until the file has num_bytes."""
    rng = random.Random(0)
    text = "".join(rng.choices(string.ascii_letters + " \n", k=200_000))
    written = 0
    with path.open("wb") as file:
        while written < num_bytes:
            length = int(100 * 1000 ** rng.random())
            start = rng.randrange(len(text) - length)
            line = json.dumps({"text": text[start : start + length]}).encode() + b"\n"
            written += file.write(line)


def read(path: Path, seq_len: int, num_streams: int) -> None:
    """Read about one pass over the file, and print what it took as JSON."""
    from titan_moe.config.sections import Data, DataLoader, RunConfig, Source, Training
    from titan_moe.data import build_train_loader

    config = RunConfig.model_construct(
        model=_Vocabulary(),
        training=Training(
            local_batch_size=BATCH,
            global_batch_size=BATCH,
            seq_len=seq_len,
            steps=1,
            dataloader=DataLoader(num_workers=0),
        ),
        data=Data(
            add_bos=True,
            add_eos=True,
            num_streams=num_streams,
            sources=[Source(name="corpus", path=str(path))],
        ),
    )
    loader = build_train_loader(config, 0, 1)
    next(loader)
    before = _peak_mib()
    start = time.perf_counter()
    steps = path.stat().st_size // (BATCH * seq_len)
    for _ in range(steps):
        next(loader)
    seconds = time.perf_counter() - start
    result = {
        "peak_mib_after_first_step": before,
        "peak_mib": _peak_mib(),
        "tokens_per_second": round(steps * BATCH * seq_len / seconds),
        "stream_0": loader.state()["streams"]["corpus"]["0"],
    }
    print(json.dumps(result))


class _Vocabulary:
    vocab_size = 259


def _peak_mib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--num-streams", type=int, default=16)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read is not None:
        read(args.read, args.seq_len, args.num_streams)
        return
    for megabytes in (SMALL_MEGABYTES, args.megabytes):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "corpus.jsonl"
            write_jsonl(path, megabytes * 1_000_000)
            command = [sys.executable, "-m", "benchmarks.data_memory", "--read", str(path)]
            sizes = ["--seq-len", str(args.seq_len), "--num-streams", str(args.num_streams)]
            done = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True)
            print(f"{path.stat().st_size / 1e6:8.0f} MB: {done.stdout.strip()}")


if __name__ == "__main__":
    main()
