"""The figure of matplotlib behind a picture."""

from unittest import mock

from matplotlib.figure import Figure


def figure_of(picture):
    """The figure that a function draws and returns as SVG."""
    save = Figure.savefig
    with mock.patch.object(Figure, "savefig", autospec=True, side_effect=save) as saved:
        picture()
    return saved.call_args.args[0]
