"""Handwritten digits: a small residual network, from nothing to a float32 SavedModel.

    keras-mp train digits

Hardware: 2 cores of a CPU. Time: half a minute on TensorFlow, under a minute on JAX, with the export.
Expect, on the 355 test images, the mean of three seeds (docs/tables/digits-parity.md): 98.9% in float32, 99.0% in
mixed_bfloat16, 98.9% in mixed_float16; one image is 0.28%. On a CPU a mixed_float16 step takes two to five times as
long.
"""

import dataclasses
from typing import Annotated

import keras
from keras import layers

import keras_mp
from keras_mp.parallel import gather
from keras_mp.training import PolicyChoice, ShuffledBatches
from models.resnet import resnet_cifar
from recipes.common.config import TrainingConfig, above_zero
from recipes.common.devices import over_devices
from recipes.common.finish import TrainingResult, finish
from recipes.common.fit import fit
from recipes.common.run_folder import run_folder
from recipes.common.schedule import warmup_then_cosine
from recipes.datasets.digits import CLASSES, IMAGE_SHAPE, LARGEST_PIXEL, load


@dataclasses.dataclass(frozen=True)
class Config(TrainingConfig):
    """What can be set, here and on the command line."""

    epochs: Annotated[int, "passes over the training data"] = 20
    batch_size: Annotated[int, "images a step"] = 64
    learning_rate: Annotated[float, "peak, after warm-up"] = 4e-3
    weight_decay: Annotated[float, "decoupled, as in AdamW"] = 0.01
    name: Annotated[str, "folder of this run; -2, -3, ... is added when it exists"] = "digits"
    width: Annotated[int, "channels of the first stage"] = 32
    data_dir: Annotated[str | None, "folder of the prepared data; by default that of tensorflow-datasets"] = None

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "width")
        if self.policy == "fp8":
            raise ValueError("policy fp8 is for dense layers, and here all but the last are convolutions: use another")


def digits() -> Config:
    """The training recipe as it is meant to be run."""
    return Config()


def build(config: Config, augment: bool = True) -> keras.Model:
    """Builds the classifier: pixels 0 to 16 in, float32 logits out, augmentation inside."""
    # The coordinates of an augmented pixel need float32, whatever the model computes in.
    augmentation = [
        layers.RandomTranslation(0.1, 0.1, fill_mode="constant", dtype="float32"),
        layers.RandomRotation(1 / 30, fill_mode="constant", dtype="float32"),
        layers.RandomZoom(0.1, fill_mode="constant", dtype="float32"),
    ]
    resnet = resnet_cifar(8, CLASSES, IMAGE_SHAPE, config.width)
    rescaling = layers.Rescaling(1 / LARGEST_PIXEL, dtype="float32")
    return keras.Sequential(
        [keras.Input(IMAGE_SHAPE, name="images"), rescaling, *(augmentation if augment else []), resnet], name="digits"
    )


def model_to_train(config: Config, choice: PolicyChoice, steps: int, augment: bool = True) -> keras.Model:
    """Builds the classifier and compiles it for a number of steps."""
    optimizer = keras.optimizers.AdamW(
        warmup_then_cosine(config.learning_rate, steps),
        weight_decay=config.weight_decay,
        gradient_accumulation_steps=config.accumulate if config.accumulate > 1 else None,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras_mp.prepare(
        build(config, augment), optimizer, loss, metrics=["accuracy"], state_dtype=config.state_dtype
    )


def step(config: Config) -> tuple[keras.Model, tuple]:
    """The model, and the shapes of a batch: what `keras-mp inspect digits` looks at.

    Without augmentation on TensorFlow, which cannot jit it.
    """
    augment = keras.backend.backend() == "jax"
    model = model_to_train(config, keras_mp.set_global_policy(config.policy), 10, augment)
    images = keras.KerasTensor((config.batch_size, *IMAGE_SHAPE), "float32")
    return model, (images, keras.KerasTensor((config.batch_size,), "int32"))


def batches(config: Config) -> ShuffledBatches:
    """The training data: what `keras-mp audit digits` looks at, too."""
    return ShuffledBatches(*load("train", config.data_dir), config.batch_size, config.seed)


def train(config: Config) -> TrainingResult:
    """Trains, tests, saves and exports, as the config says."""
    choice = keras_mp.set_global_policy(config.policy)
    keras.utils.set_random_seed(config.seed)
    data = batches(config)
    test_images, test_labels = load("test", config.data_dir)

    with over_devices(config):
        model = model_to_train(config, choice, config.epochs * data.steps)
        folder = run_folder(config)
        training = fit(model, data, config, folder, (test_images, test_labels), len(test_images))
    model = gather(model)
    accuracy = training.history.rows[-1]["test_accuracy"]
    return finish(model, config, folder, choice, training, "test accuracy", accuracy, verify=test_images[:64])
