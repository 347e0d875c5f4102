"""The learning rate of the training recipes."""

import keras


def warmup_then_cosine(peak: float, steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """Makes a learning rate that rises to its peak in a tenth of the steps, then falls to zero along a cosine.

    Args:
        peak: the highest learning rate.
        steps: the steps of the whole training.

    Returns:
        The schedule.
    """
    warmup_steps = steps // 10
    return keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup_steps, warmup_target=peak, warmup_steps=warmup_steps
    )
