"""What every picture of a notebook has to have, checked where it is drawn: a title, and a label on each axis; and the
logarithmic axis of several.

Decision: checked in the kernel, when a figure becomes an image, since the image does not tell.
"""

from __future__ import annotations

from typing import Any

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.ticker import LogLocator, NullFormatter

faults: list[str] = []


def watch() -> None:
    """Note the faults of every figure that is drawn from now on."""
    draw = FigureCanvasBase.print_figure

    def print_figure(canvas: Any, *args: Any, **kwargs: Any) -> Any:
        faults.extend(faults_of(canvas.figure))
        return draw(canvas, *args, **kwargs)

    FigureCanvasBase.print_figure = print_figure  # pyright: ignore[reportAttributeAccessIssue]


def faults_of(figure: Any) -> list[str]:
    """What is missing: a title of each panel or of the whole figure; labels of its axes, of the figure's, or of a panel
    that shares the axis."""
    found = []
    panels = [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]
    for number, axes in enumerate(panels, 1):
        shared_x, shared_y = (each.get_siblings(axes) for each in (axes.get_shared_x_axes(), axes.get_shared_y_axes()))
        if not (axes.get_title() or axes.get_title("left") or figure.get_suptitle()):
            found.append(f"panel {number} has no title")
        if not (figure.get_supxlabel() or any(each.get_xlabel() for each in shared_x)):
            found.append(f"panel {number} has no label on its x axis")
        if not (figure.get_supylabel() or any(each.get_ylabel() for each in shared_y)):
            found.append(f"panel {number} has no label on its y axis")
    return found


def log_axis(axis: Any) -> None:
    """Make an axis of a panel logarithmic, with plain numbers at 1, 2 and 5 of every decade."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
