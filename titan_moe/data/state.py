"""Where the data path stands, as JSON-able data: one small record per stream.

    {"schema", "identity": what fixes the meaning of the records, "sources": [{"name", ...}],
     "part": [dp_rank, dp_degree] of one rank's state, null once merged,
     "sequences": n, "counts": sequences taken from each source,
     "streams": {source: {stream: {"number", "epoch", "place", "cursor", "tokens"}}}}

A stream without a record has not been read yet.
"""

from typing import Any

SCHEMA = 1

State = dict[str, Any]


def merge_states(states: list[State]) -> State:
    """One state of all data ranks' states after the same step; any layout continues from it."""
    assert states, "no state to merge"
    first = states[0]
    parts = sorted(state["part"] for state in states)
    assert parts == [[rank, len(states)] for rank in range(len(states))], f"not one each: {parts}"
    streams: dict[str, dict[str, Any]] = {source["name"]: {} for source in first["sources"]}
    for state in states:
        for key in ("identity", "sources", "sequences", "counts"):
            assert state[key] == first[key], f"data ranks disagree on {key}"
        for name, records in state["streams"].items():
            assert not streams[name].keys() & records.keys(), f"{name}: a stream on two ranks"
            streams[name].update(records)
    return {**first, "part": None, "streams": streams}


def fresh_state(description: State) -> State:
    """Nothing read yet. description: "schema", "identity" and "sources" of the run."""
    names = [source["name"] for source in description["sources"]]
    return {
        **description,
        "part": None,
        "sequences": 0,
        "counts": [0] * len(names),
        "streams": {name: {} for name in names},
    }


def check_state(state: State, description: State, part: list[int]) -> None:
    """Raises ValueError, naming the key, where the state does not belong to this run's
    description, or is one rank's alone and not that of `part` ([dp_rank, dp_degree])."""
    if state["schema"] != SCHEMA:
        raise ValueError(f"data state has schema {state['schema']}; this version reads {SCHEMA}")
    if state["part"] is not None and state["part"] != part:
        raise ValueError(
            f"data state of rank {state['part'][0]} of {state['part'][1]} given to rank {part[0]} "
            f"of {part[1]}; merge the states of all ranks first"
        )
    _compare(state["identity"], description["identity"], "")
    sources = description["sources"]
    then, now = ([source["name"] for source in group] for group in (state["sources"], sources))
    if then != now:
        raise ValueError(f"data.sources are {now} now, but {then} in the checkpoint")
    for before, after in zip(state["sources"], sources, strict=True):
        _compare(before, after, f"data.sources {after['name']!r}: ")


def _compare(before: State, after: State, where: str) -> None:
    assert before.keys() == after.keys(), f"{where}{sorted(before)} is not {sorted(after)}"
    for key, value in after.items():
        if before[key] != value:
            raise ValueError(
                f"{where}{key} is {value} now, but {before[key]} in the checkpoint; "
                "it fixes which tokens come next, so a run cannot change it"
            )
