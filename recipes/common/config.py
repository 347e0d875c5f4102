"""What can be set in every training recipe, with the checks."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import keras_mp

# What a resumed run may be asked for differently: it changes nothing, or TrainingCheckpoint says what it changes.
MAY_DIFFER = frozenset(
    "policy eval_policy state_dtype fp8 name output resume force checkpoint_every tensorboard export data_dir download "
    "strategy devices hosts host_index prompt generate temperature".split()
)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """What can be set in every training recipe, in the code and on the command line."""

    policy: Annotated[str, "auto, float32, mixed_bfloat16 or mixed_float16"] = "auto"
    eval_policy: Annotated[str | None, "also test the trained model in this precision"] = None
    epochs: Annotated[int, "passes over the training data"] = 1
    batch_size: Annotated[int, "examples a step"] = 64
    accumulate: Annotated[int, "batches whose gradients are added up for one update"] = 1
    learning_rate: Annotated[float, "peak, after warm-up"] = 1e-3
    weight_decay: Annotated[float, "decoupled, as in AdamW"] = 0.0
    state_dtype: Annotated[str, "of the optimizer's states: float32, bfloat16 or float8"] = "float32"
    seed: Annotated[int, "of the weights, the order of the data, augmentation and dropout"] = 0
    name: Annotated[str, "folder of this run; -2, -3, ... is added when it exists"] = "run"
    output: Annotated[str, "folder of all runs"] = "runs"
    resume: Annotated[bool, "go on from the newest checkpoint of the last run of this name"] = False
    force: Annotated[bool, "with --resume: go on with other settings, too"] = False
    checkpoint_every: Annotated[int, "steps between checkpoints; 0 for one at the end of each epoch"] = 0
    tensorboard: Annotated[bool, "write logs for TensorBoard into the folder of the run"] = False
    export: Annotated[bool, "write and verify a float32 SavedModel"] = True
    strategy: Annotated[str | None, "over several devices: data, fully_sharded or tensor"] = None
    devices: Annotated[int | None, "how many devices of this machine; by default all, where a strategy is given"] = None
    hosts: Annotated[str | None, "host0:port,host1:port: train together; TF_CONFIG and SLURM are read, too"] = None
    host_index: Annotated[int | None, "which of the hosts this is, from 0, where its name does not tell"] = None

    def __post_init__(self) -> None:
        above_zero(self, "epochs", "batch_size", "accumulate", "learning_rate")
        at_least_zero(self, "seed", "weight_decay", "checkpoint_every")
        one_of(self, "state_dtype", ("float32", "bfloat16", "float8"))
        one_of(self, "eval_policy", (None, "float32", "mixed_float16", "mixed_bfloat16", "fp8"))


@dataclasses.dataclass(frozen=True)
class TransformerConfig(TrainingConfig):
    """What can be set in every training recipe of a transformer, too."""

    policy: Annotated[str, "auto, float32, mixed_bfloat16, mixed_float16 or fp8"] = "auto"
    fp8: Annotated[str, f"for the policy fp8: {', '.join(keras_mp.fp8.Scalings.names())}"] = "current"
    remat: Annotated[bool, "recompute each block in the backward pass: less memory, more time"] = False
    dropout: Annotated[float, "share dropped while training"] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        keras_mp.fp8.Scalings.named(self.fp8)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")


def one_of(config: Any, field: str, known: Sequence[Any]) -> None:
    """Raises a ValueError that names the field if its value is none of those that are known."""
    if getattr(config, field) not in known:
        listed = ", ".join(str(value) for value in known if value is not None)
        raise ValueError(f"{field} must be one of {listed}, got {getattr(config, field)!r}")


def above_zero(config: Any, *fields: str) -> None:
    """Raises a ValueError that names the first of the fields that is not above 0; None, a default to come, passes."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not value > 0:
            raise ValueError(f"{field} must be above 0, got {value}")


def at_least_zero(config: Any, *fields: str) -> None:
    """Raises a ValueError that names the first of the fields that is below 0; None, a default to come, passes."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not value >= 0:
            raise ValueError(f"{field} must be at least 0, got {value}")
