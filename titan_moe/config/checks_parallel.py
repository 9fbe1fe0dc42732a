"""Rows of the table of checks that concern how a run is laid over processes."""

from collections.abc import Iterator

from titan_moe.config.errors import Fault
from titan_moe.config.layout import Layout
from titan_moe.config.sections import Parallelism, RunConfig
from titan_moe.config.topology import stays_inside

Faults = Iterator[Fault]

TENSOR = "parallelism.tensor_parallel_degree"
EXPERT = "parallelism.expert_parallel_degree"
SHARD = "parallelism.data_parallel_shard_degree"
OTHERS = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)


def layout_of(section: Parallelism, world: int | None) -> Layout | None:
    """The layout; None: unknown without the world.

    Raises:
        ValueError: there is none for that world.
    """
    world = world or Layout.world_of(section)
    return None if world is None else Layout.of(section, world)


def dense_layout_of(section: Parallelism, world: int | None) -> Layout | None:
    """As `layout_of`, with the experts whole: their degree has no part in the world's size."""
    return layout_of(section.model_copy(update={"expert_parallel_degree": 1}), world)


def data_parallel_degree(config: RunConfig, world: int | None) -> int | None:
    """Ranks that read different rows; None: unknown without the world, or not a layout of it."""
    try:
        layout = dense_layout_of(config.parallelism, world)
    except ValueError:
        return None
    return None if layout is None else layout.dp_degree


def degrees_fill_world(config: RunConfig, world: int | None) -> Faults:
    section = config.parallelism
    try:
        dense_layout_of(section, world)
    except ValueError as error:
        largest = max(OTHERS, key=lambda name: getattr(section, name))
        is_free = section.data_parallel_shard_degree == -1
        yield Fault(f"parallelism.{largest}" if is_free else SHARD, str(error))


def experts_fold(config: RunConfig, world: int | None) -> Faults:
    if data_parallel_degree(config, world) is None:
        return
    try:
        layout_of(config.parallelism, world)
    except ValueError as error:
        yield Fault(EXPERT, str(error))


def experts_divide(config: RunConfig, world: int | None) -> Faults:
    experts = config.model.num_experts
    if experts % config.parallelism.expert_parallel_degree:
        yield Fault(EXPERT, f"does not divide model.num_experts {experts}")


def experts_are_there(config: RunConfig, world: int | None) -> Faults:
    model, section = config.model, config.parallelism
    if _has_experts(config):
        return
    layers = f"model.num_layers {model.num_layers} - num_dense_layers {model.num_dense_layers} = 0"
    if section.expert_parallel_degree > 1:
        yield Fault(EXPERT, f"{layers} layers have experts")
    if section.max_expert_tokens is not None:
        yield Fault("parallelism.max_expert_tokens", f"{layers} layers have experts")


def _has_experts(config: RunConfig) -> bool:
    return config.model.num_moe_layers + config.model.mtp_depth() > 0


def widths_divide(config: RunConfig, world: int | None) -> Faults:
    degree = config.parallelism.tensor_parallel_degree
    for name, size in config.model.tensor_parallel_sizes().items():
        if size % degree:
            padded = -(-size // degree) * degree
            remedy = f"; pad it to {padded}" if name == "vocab_size" else ""
            total = f"model.{name} = {size}" if "*" in name else f"model.{name} {size}"
            yield Fault(TENSOR, f"does not divide {total}{remedy}")


def sequence_divides(config: RunConfig, world: int | None) -> Faults:
    section, tokens = config.parallelism, config.training.seq_len
    cp, tp = section.context_parallel_degree, section.tensor_parallel_degree
    splits_tokens = section.sequence_parallel or _has_experts(config)
    chunks = 2 if cp > 1 and section.context_parallel_load_balancer == "headtail" else 1
    if tokens % (chunks * cp):
        degree = f"context_parallel_degree {cp}"
        halves = f"{chunks} headtail chunks * {degree} = {chunks * cp}"
        yield Fault("training.seq_len", f"not a multiple of {halves if chunks > 1 else degree}")
    elif splits_tokens and tokens // cp % tp:
        share = f"{tokens} / context_parallel_degree {cp} = {tokens // cp} tokens"
        whole = f"{tokens} tokens" if cp == 1 else share
        yield Fault("training.seq_len", f"{whole}, not a multiple of tensor_parallel_degree {tp}")


def batch_divides(config: RunConfig, world: int | None) -> Faults:
    training = config.training
    degree = data_parallel_degree(config, world) or 1
    rows = training.local_batch_size or 1
    if training.global_batch_size % (degree * rows):
        product = f"{degree} data-parallel ranks"
        if training.local_batch_size:
            product += f" * local_batch_size {rows} = {degree * rows}"
        yield Fault("training.global_batch_size", f"not a multiple of {product}")


def ranks_share_streams(config: RunConfig, world: int | None) -> Faults:
    degree, streams = data_parallel_degree(config, world), config.data.num_streams
    if degree is not None and streams % degree:
        yield Fault("data.num_streams", f"not a multiple of {degree} data-parallel ranks")


def workers_share_streams(config: RunConfig, world: int | None) -> Faults:
    degree, streams = data_parallel_degree(config, world) or 1, config.data.num_streams
    workers = config.training.dataloader.num_workers
    if streams % degree == 0 and workers > streams // degree:
        arithmetic = (
            f"data.num_streams {streams} / {degree} data-parallel ranks = {streams // degree}"
        )
        yield Fault("training.dataloader.num_workers", f"more than {arithmetic}")


def slices_have_masks(config: RunConfig, world: int | None) -> Faults:
    training, cp = config.training, config.parallelism.context_parallel_degree
    # With document masks sdpa cannot go anyway, which is another row's to tell.
    if cp > 1 and training.attention_backend == "sdpa" and not training.document_mask:
        remedy = 'use "auto", "flex" or "blocked"'
        message = f"cannot go with parallelism.context_parallel_degree {cp}; {remedy}"
        yield Fault("training.attention_backend", message)


def tensor_parallel_inside(config: RunConfig, world: int | None) -> Faults:
    section = config.parallelism
    tp, domain = section.tensor_parallel_degree, section.scale_up_size
    if domain is None or section.tensor_parallel_across_domains:
        return
    try:
        layout = dense_layout_of(section, world) or Layout(tp=tp)
    except ValueError:
        return
    if not stays_inside(layout, domain).get("tp", True):
        why = f"is more than {domain}" if tp > domain else f"{domain} % {tp} = {domain % tp}"
        remedy = "lower it, or allow it by tensor_parallel_across_domains = true"
        yield Fault(TENSOR, f"a group crosses domains of scale_up_size {domain} ({why}); {remedy}")


def two_tiers_are_there(config: RunConfig, world: int | None) -> Faults:
    section = config.parallelism
    if section.expert_parallel_comm_backend != "two_tier":
        return
    ep, domain = section.expert_parallel_degree, section.scale_up_size
    key, flat = "parallelism.expert_parallel_comm_backend", 'or use "flat"'
    if domain is None:
        yield Fault(key, f"set parallelism.scale_up_size, the ranks of a fast domain, {flat}")
    elif ep % domain or ep == domain:
        domains = f"expert_parallel_degree {ep} / scale_up_size {domain} = {ep / domain:.4g}"
        yield Fault(key, f"{domains} domains; make it 2 or more whole ones, {flat}")
