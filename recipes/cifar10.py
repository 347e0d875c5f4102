"""CIFAR-10: a residual network for small photographs.

    keras-mp train cifar10 --download
    keras-mp train cifar10 --depth 56 --policy mixed_float16

Hardware: one GPU or TPU chip. Nothing here was measured yet: CIFAR-10 is in no package, and has to be downloaded
(162 MiB).
Expect, on the 10,000 test images, what the paper reached (He et al. 2016, arXiv:1512.03385, table 6): 91.25% for depth
20, 93.03% for depth 56. Its 64,000 steps of 128 images are the 164 epochs here; its learning rate falls in steps, and
here along a cosine.
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
from recipes.datasets.cifar10 import CLASSES, IMAGE_SHAPE, load
from recipes.datasets.prepared import DataConfig

# Mean and standard deviation of the training images' channels: what everyone uses for this set.
MEAN = (125.3, 123.0, 113.9)
DEVIATION = (63.0, 62.1, 66.7)
SHIFT = 4 / 32


@dataclasses.dataclass(frozen=True)
class Config(DataConfig, TrainingConfig):
    """What can be set, here and on the command line."""

    epochs: Annotated[int, "passes over the training data"] = 164
    batch_size: Annotated[int, "images a step"] = 128
    learning_rate: Annotated[float, "peak, after warm-up"] = 0.1
    # The paper adds 1e-4 to the gradient, which a momentum of 0.9 makes up to ten times that.
    weight_decay: Annotated[float, "decoupled: times the learning rate"] = 1e-3
    name: Annotated[str, "folder of this run; -2, -3, ... is added when it exists"] = "cifar10"
    depth: Annotated[int, "layers with weights: 8, 14, 20, 32, 44, 56 or 110"] = 20
    width: Annotated[int, "channels of the first stage"] = 16

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "width")
        if self.policy == "fp8":
            raise ValueError("policy fp8 is for dense layers, and here all but the last are convolutions: use another")


def cifar10() -> Config:
    """The training recipe as it is meant to be run."""
    return Config()


def build(config: Config, augment: bool = True) -> keras.Model:
    """Builds the classifier: pixels 0 to 255 in, float32 logits out, augmentation inside."""
    scale = [1 / deviation for deviation in DEVIATION]
    offset = [-mean / deviation for mean, deviation in zip(MEAN, DEVIATION, strict=True)]
    normalization = layers.Rescaling(scale, offset, dtype="float32")
    # Whole pixels, and what moves in from outside is the mean, as in the paper's section 4.2.
    augmentation = [
        layers.RandomTranslation(SHIFT, SHIFT, fill_mode="constant", interpolation="nearest", dtype="float32"),
        layers.RandomFlip("horizontal", dtype="float32"),
    ]
    resnet = resnet_cifar(config.depth, CLASSES, IMAGE_SHAPE, config.width)
    images = keras.Input(IMAGE_SHAPE, dtype="uint8", name="images")
    return keras.Sequential([images, normalization, *(augmentation if augment else []), resnet], name="cifar10")


def model_to_train(config: Config, choice: PolicyChoice, steps: int, augment: bool = True) -> keras.Model:
    """Builds the classifier and compiles it for a number of steps."""
    optimizer = keras.optimizers.SGD(
        warmup_then_cosine(config.learning_rate, steps),
        momentum=0.9,
        weight_decay=config.weight_decay,
        gradient_accumulation_steps=config.accumulate if config.accumulate > 1 else None,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras_mp.prepare(
        build(config, augment), optimizer, loss, metrics=["accuracy"], state_dtype=config.state_dtype
    )


def step(config: Config) -> tuple[keras.Model, tuple]:
    """The model, and the shapes of a batch: what `keras-mp inspect cifar10` looks at.

    Without augmentation on TensorFlow, which cannot jit it.
    """
    augment = keras.backend.backend() == "jax"
    model = model_to_train(config, keras_mp.set_global_policy(config.policy), 10, augment)
    images = keras.KerasTensor((config.batch_size, *IMAGE_SHAPE), "uint8")
    return model, (images, keras.KerasTensor((config.batch_size,), "int32"))


def batches(config: Config) -> ShuffledBatches:
    """The training data: what `keras-mp audit cifar10` looks at, too."""
    return ShuffledBatches(*load("train", config.data_dir, config.download), config.batch_size, config.seed)


def train(config: Config) -> TrainingResult:
    """Trains, tests, saves and exports, as the config says."""
    choice = keras_mp.set_global_policy(config.policy)
    keras.utils.set_random_seed(config.seed)
    data = batches(config)
    test_images, test_labels = load("test", config.data_dir, config.download)

    with over_devices(config):
        model = model_to_train(config, choice, config.epochs * data.steps)
        folder = run_folder(config)
        training = fit(model, data, config, folder, (test_images, test_labels), config.batch_size)
    model = gather(model)
    accuracy = training.history.rows[-1]["test_accuracy"]
    return finish(model, config, folder, choice, training, "test accuracy", accuracy, verify=test_images[:64])
