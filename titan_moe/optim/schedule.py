"""The learning rate: warmup, stable, decay, as a pure function of tokens seen. Torch-free."""

import math

from titan_moe.config.sections import LrScheduler, Optimizer, Training


def learning_rate(
    tokens_seen: int, section: Optimizer, scheduler: LrScheduler, training: Training
) -> float:
    """Learning rate of the step that follows `tokens_seen` tokens.

    The schedule is read at the tokens seen when that step is done: with 100 steps of warmup the
    first step has lr / 100, the hundredth lr, and the last step of the decay lr * min_lr_factor.

    lr rises linearly over `warmup_steps`, stays, and falls over the last `decay_ratio` of
    `total_steps` (all that follows warmup if absent) to lr * min_lr_factor, where it remains. With
    x the share of the decay that is done, it falls as 1 - x (linear), 1 - sqrt(x) (sqrt, after
    arXiv 2405.18392) or (1 + cos(pi x)) / 2 (cosine).

    Raises:
        ValueError: warmup and decay overlap.
    """
    batch_tokens = training.global_batch_size * training.seq_len
    total = scheduler.total_steps or training.steps
    warmup = scheduler.warmup_steps
    if scheduler.decay_ratio is None:
        decay = max(total - warmup, 0)
    else:
        decay = round(total * scheduler.decay_ratio)
        if warmup + decay > total:
            raise ValueError(
                f"lr_scheduler: {warmup} warmup_steps + {decay} steps of decay (decay_ratio "
                f"{scheduler.decay_ratio} × {total}) exceed the {total} total_steps; shorten one"
            )
    steps_done = tokens_seen / batch_tokens + 1.0
    if steps_done < warmup:
        return section.lr * steps_done / warmup
    if steps_done <= total - decay:
        return section.lr
    x = min((steps_done - (total - decay)) / decay, 1.0) if decay else 0.0
    left = {
        "linear": 1.0 - x,
        "sqrt": 1.0 - math.sqrt(x),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * x)),
    }[scheduler.decay_type]
    return section.lr * (scheduler.min_lr_factor + (1.0 - scheduler.min_lr_factor) * left)
