"""The jitted programs inside a graph of TensorFlow."""


def jitted(function):
    """The names of the jitted programs that a traced function, or a concrete one, calls."""
    concrete = function.get_concrete_function() if hasattr(function, "get_concrete_function") else function
    library = concrete.graph.as_graph_def().library.function
    return [called.signature.name for called in library if called.attr["_XlaMustCompile"].b]
