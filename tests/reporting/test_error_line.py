from keras_mp.reporting.error_line import error_line


def test_an_error_in_one_line():
    assert error_line(TypeError("no floats\n\nStack: ...")) == "TypeError: no floats"
    assert error_line(KeyError()) == "KeyError: "
    assert error_line(ValueError("x" * 1000)) == f"ValueError: {'x' * 500}"


def test_the_line_of_keras_that_names_the_layer_and_the_reason_after_it():
    error = ValueError("Exception encountered when calling Dense.call().\n\n\x1b[1mtoo wide\x1b[0m\n\nArguments: ...")
    assert error_line(error) == "ValueError: Exception encountered when calling Dense.call(). too wide"


def test_nodes_of_tensorflow_lose_their_braces():
    error = RuntimeError("{{function_node __wrapped__MatMul}} {{node model/dense}} has no kernel\n at 0x1")
    assert error_line(error) == "RuntimeError: model/dense has no kernel"
