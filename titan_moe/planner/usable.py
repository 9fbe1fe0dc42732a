"""How much of a GPU's memory tensors can have. Torch-free."""

from titan_moe.planner.cluster import Cluster

# What no tensor gets: the CUDA context and kernels' code (about 1 GB), NCCL's channels and buffers
# (1 to 3 GB with several communicators of many ranks), workspaces of matmuls (tens of MB each), and
# what the caching allocator cannot use between blocks of unequal size. Runs near the limit stop at
# 90 to 95% in tensors; a plan that needs more than the middle of that may fail by a stray block.
RESERVE_SHARE = 0.08


def usable_bytes(cluster: Cluster) -> int:
    """Of one GPU, in bytes: memory_gb less the reserve."""
    return int(cluster.gpu.memory_gb * 1e9 * (1.0 - RESERVE_SHARE))
