"""A training recipe on several devices, and on several machines."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras_mp
from keras_mp.parallel import workers
from recipes.common.config import TrainingConfig


def over_devices(config: TrainingConfig) -> AbstractContextManager[Any]:
    """The scope in which a training recipe builds its model and trains it.

    Args:
        config: the training recipe's config, with `strategy` and `devices`.

    Returns:
        `keras_mp.parallel.distribute` where several devices or processes are asked for; else a scope that does nothing.

    Raises:
        ValueError: there are no such devices, or something asked for does not go together.
    """
    if config.strategy is None and config.devices is None and workers.count() == 1:
        return nullcontext()
    if config.eval_policy is not None:
        raise ValueError(
            f"eval_policy={config.eval_policy} tests on one device: leave it out, or leave out --strategy, --devices "
            "and --hosts"
        )
    return keras_mp.parallel.distribute(config.strategy or "data", config.devices)
