"""ImageNet: ResNet-50 or a vision transformer, from photographs of any size.

    keras-mp train imagenet --data-dir /data/tensorflow_datasets
    keras-mp train imagenet --data-dir /data/tensorflow_datasets --model vit --batch-size 256 --accumulate 4

Hardware: a GPU or a TPU chip, and the cores that decode its images. The data set has to be fetched by hand (144 GiB):
without it the training recipe says how. Nothing here was measured yet.
Expect, on the 50,000 validation images, the papers' numbers: 76.4% for ResNet-50 (Goyal et al. 2017, arXiv:1706.02677,
table 1, batch 256, 90 epochs; NVIDIA's DeepLearningExamples reach 76.99% with float16 and 77.01% without). A ViT-S/16
reaches 76.5% in 90 epochs with RandAugment and Mixup (Beyer et al. 2022, arXiv:2205.01580), which this training
recipe does not have: expect less.
"""

import dataclasses
from typing import Annotated

import keras
import numpy as np
from keras import layers

import keras_mp
from keras_mp.parallel import gather
from keras_mp.training import Batches, PolicyChoice
from models.resnet import resnet_imagenet
from models.vit import SIZES, vit
from recipes.common.config import TransformerConfig, above_zero
from recipes.common.devices import over_devices
from recipes.common.finish import TrainingResult, finish
from recipes.common.fit import fit
from recipes.common.fp8 import every_product
from recipes.common.run_folder import run_folder
from recipes.common.schedule import warmup_then_cosine
from recipes.datasets.imagenet import CLASSES, test_batches, training_batches
from recipes.datasets.prepared import DataConfig

# Mean and standard deviation of the training images' channels, on the scale of 0 to 255.
MEAN = (123.675, 116.28, 103.53)
DEVIATION = (58.395, 57.12, 57.375)
RESNET, VIT = "resnet50", "vit"


@dataclasses.dataclass(frozen=True)
class Config(DataConfig, TransformerConfig):
    """What can be set, here and on the command line."""

    model: Annotated[str, "resnet50 or vit"] = RESNET
    epochs: Annotated[int, "passes over the training data"] = 90
    batch_size: Annotated[int, "images a step"] = 256
    learning_rate: Annotated[float | None, "peak, after warm-up; by default 0.1 for resnet50, 0.001 for vit"] = None
    weight_decay: Annotated[
        float | None, "decoupled: times the learning rate; by default 0.001 for resnet50, 0.1 for vit"
    ] = None
    name: Annotated[str, "folder of this run; -2, -3, ... is added when it exists"] = "imagenet"
    checkpoint_every: Annotated[int, "steps between checkpoints; 0 for one at the end of each epoch"] = 1000
    image_size: Annotated[int, "pixels of an image's side"] = 224
    vit_size: Annotated[str, "tiny, small or base"] = "small"
    resnet_width: Annotated[int, "channels of resnet50's first stage"] = 64

    def __post_init__(self):
        if self.model not in (RESNET, VIT):
            raise ValueError(f"model must be {RESNET} or {VIT}, got {self.model!r}")
        if self.vit_size not in SIZES:
            raise ValueError(f"vit_size must be one of {', '.join(SIZES)}, got {self.vit_size!r}")
        super().__post_init__()
        above_zero(self, "image_size", "resnet_width")
        if self.model == RESNET:
            if self.policy == "fp8":
                raise ValueError("policy fp8 is for dense layers, and resnet50 has convolutions: use another")
            if self.remat or self.dropout:
                raise ValueError("remat and dropout are for the blocks of --model vit, not for resnet50")


def imagenet() -> Config:
    """The training recipe as it is meant to be run."""
    return Config()


def resolved(config: Config) -> Config:
    """The config with the numbers that go with its model, where none were given."""
    # The paper of ResNet adds 1e-4 to the gradient, which a momentum of 0.9 makes up to ten times that.
    defaults = (0.1, 1e-3) if config.model == RESNET else (1e-3, 0.1)
    given = (config.learning_rate, config.weight_decay)
    rate, decay = (default if value is None else value for value, default in zip(given, defaults, strict=True))
    return dataclasses.replace(config, learning_rate=rate, weight_decay=decay)


def build(config: Config) -> keras.Model:
    """Builds the classifier: pixels 0 to 255 in, float32 logits out."""
    shape = (config.image_size, config.image_size, 3)
    scale = [1 / deviation for deviation in DEVIATION]
    offset = [-mean / deviation for mean, deviation in zip(MEAN, DEVIATION, strict=True)]
    if config.model == RESNET:
        classifier = resnet_imagenet(50, CLASSES, shape, config.resnet_width)
    else:
        classifier = vit(config.vit_size, CLASSES, shape, dropout=config.dropout, remat=config.remat)
    images = keras.Input(shape, dtype="uint8", name="images")
    return keras.Sequential([images, layers.Rescaling(scale, offset, dtype="float32"), classifier], name="imagenet")


def model_to_train(config: Config, choice: PolicyChoice, steps: int) -> keras.Model:
    """Builds the classifier and compiles it for a number of steps."""
    config = resolved(config)
    rate = warmup_then_cosine(config.learning_rate, steps)
    accumulate = config.accumulate if config.accumulate > 1 else None
    if config.model == RESNET:
        optimizer = keras.optimizers.SGD(
            rate, momentum=0.9, weight_decay=config.weight_decay, gradient_accumulation_steps=accumulate
        )
    else:
        optimizer = keras.optimizers.AdamW(
            rate, weight_decay=config.weight_decay, global_clipnorm=1.0, gradient_accumulation_steps=accumulate
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fp8 = every_product(choice, config.fp8)
    return keras_mp.prepare(
        build(config), optimizer, loss, metrics=["accuracy"], fp8=fp8, state_dtype=config.state_dtype
    )


def step(config: Config) -> tuple[keras.Model, tuple]:
    """The model, and the shapes of a batch: what `keras-mp inspect imagenet` looks at."""
    model = model_to_train(config, keras_mp.set_global_policy(config.policy), 10)
    images = keras.KerasTensor((config.batch_size, config.image_size, config.image_size, 3), "uint8")
    return model, (images, keras.KerasTensor((config.batch_size,), "int32"))


def batches(config: Config) -> Batches:
    """The training data: what `keras-mp audit imagenet` looks at, too."""
    return training_batches(config.batch_size, config.image_size, config.seed, config.data_dir, config.download)


def train(config: Config) -> TrainingResult:
    """Trains, tests, saves and exports, as the config says."""
    config = resolved(config)
    choice = keras_mp.set_global_policy(config.policy)
    keras.utils.set_random_seed(config.seed)
    data = batches(config)
    test = test_batches(config.batch_size, config.image_size, config.data_dir, config.download)

    with over_devices(config):
        model = model_to_train(config, choice, config.epochs * data.steps)
        folder = run_folder(config)
        training = fit(model, data, config, folder, test)
    model = gather(model)
    accuracy = training.history.rows[-1]["test_accuracy"]
    verify = np.asarray(next(iter(test))[0])[:8]
    return finish(model, config, folder, choice, training, "test accuracy", accuracy, verify=verify)
