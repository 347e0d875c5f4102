import keras
import numpy as np

from keras_mp.loss_scaling import gradients


def tensors(*values):
    return [value if value is None else keras.ops.convert_to_tensor(value, "float32") for value in values]


def test_the_mean_of_micro_batches_and_the_largest_of_what_overwrites():
    variables = [keras.Variable(np.zeros(1, dtype)) for dtype in ("float16", "float32", "float32")]
    variables[2].overwrite_with_gradient = True
    sums = gradients.empty_sums(variables)
    assert [total.dtype for total in sums] == ["float32"] * 3
    for _ in range(2):  # the second accumulation starts from nothing
        gradients.add_to_sums(tensors([6e4], None, [5.0]), sums, variables)
        gradients.add_to_sums(tensors([6e4], None, [7.0]), sums, variables)
        means = gradients.mean_and_reset(tensors([0.0], None, [6.0]), sums, variables, 3)
        assert means[1] is None
        assert [float(means[place][0]) for place in (0, 2)] == [4e4, 7.0]  # float16 would not hold the sum
        assert all(float(total.numpy()[0]) == 0 for total in sums)
