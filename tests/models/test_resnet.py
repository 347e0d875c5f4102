"""The residual networks: sizes against the papers, every precision, bad sizes."""

import numpy as np
import pytest
from shapes_alone import shapes_alone

from models.resnet import resnet_cifar, resnet_imagenet


def trainable(model):
    return sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)


# He et al. 2016, table 6, in millions; ours has a 1x1 convolution on two shortcuts, hence the 0.01 either way.
@pytest.mark.parametrize("depth, millions", [(20, 0.27), (56, 0.85)])
def test_cifar_parameters_are_those_of_the_paper(depth, millions):
    with shapes_alone():
        assert trainable(resnet_cifar(depth)) / 1e6 == pytest.approx(millions, abs=0.01)


# The counts torchvision documents for the same networks.
@pytest.mark.parametrize("depth, parameters", [(18, 11_689_512), (50, 25_557_032), (101, 44_549_160)])
def test_imagenet_parameters_are_those_published(depth, parameters):
    with shapes_alone():
        assert trainable(resnet_imagenet(depth)) == parameters


def test_bottleneck_strides_in_its_3x3_convolution():
    with shapes_alone():
        model = resnet_imagenet(50)
    assert model.get_layer("stage2_block1_1_conv").strides == (1, 1)
    assert model.get_layer("stage2_block1_2_conv").strides == (2, 2)
    assert model.get_layer("stage4_block3_add").output.shape == (None, 7, 7, 2048)
