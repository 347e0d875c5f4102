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
    grads = tensors([6e4], None, [5.0]), tensors([6e4], None, [7.0]), tensors([0.0], None, [6.0])
    for _ in range(2):  # the second accumulation starts from nothing
        for place, values in enumerate(grads):
            gradients.add_to_sums(values, sums, variables, keras.ops.equal(place, 0))
        means = gradients.means_of(sums, grads[-1], variables, 3)
        assert means[1] is None
        assert [float(means[place][0]) for place in (0, 2)] == [4e4, 7.0]  # float16 would not hold the sum


def test_a_variable_with_no_gradient_in_the_first_micro_batch_begins_anew():
    variables = [keras.Variable([0.0])]
    sums = gradients.empty_sums(variables)
    for window in ([3.0], [5.0]), (None, [7.0]):
        for place, values in enumerate(window):
            grads = tensors(values)
            gradients.add_to_sums(grads, sums, variables, keras.ops.equal(place, 0))
        means = gradients.means_of(sums, grads, variables, 2)
    assert float(means[0][0]) == 3.5
