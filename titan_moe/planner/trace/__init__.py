"""Memory, messages and matmuls of a run, seen by running its own code on tensors without memory."""

from titan_moe.planner.trace.run import Trace, trace

__all__ = ["Trace", "trace"]
