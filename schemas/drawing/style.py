"""Drawing by matplotlib in the package's own style.

Other modules import matplotlib's names from here. Backend, style and ``matplotlibrc`` of the user have no influence.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from schemas.errors import InputError

# Only pyplot needs a backend, but the import fails for one that is not installed, as notebooks name it to their programs.
_is_first, _backend = "matplotlib" not in sys.modules, os.environ.pop("MPLBACKEND", "")
try:
    from matplotlib import patheffects as patheffects
    from matplotlib import rc_context, rcParams, rcParamsDefault
    from matplotlib.axes import Axes as Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvasAgg
    from matplotlib.collections import LineCollection as LineCollection
    from matplotlib.figure import Figure as Figure
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.patches import Rectangle as Rectangle
    from matplotlib.text import Text as Text
    from matplotlib.ticker import MaxNLocator as MaxNLocator
    from matplotlib.transforms import Affine2D as Affine2D
except (OSError, ValueError) as error:
    raise InputError(f"matplotlib cannot read its configuration ({error}): correct or move the file matplotlibrc") from error
finally:
    if _backend:
        os.environ["MPLBACKEND"] = _backend
if _is_first and _backend:
    with suppress(ValueError):
        rcParams["backend"] = _backend

_STYLE: dict[Any, Any] = {
    **{name: value for name, value in rcParamsDefault.items() if name != "backend"},
    "svg.hashsalt": "imagepivot",
}
"""The defaults of matplotlib; without a salt, SVG has random ids."""


@contextmanager
def own_style() -> Iterator[None]:
    """Draw in the package's own style inside the block, or in a decorated function.

    Artists take settings both when they are created and when they are drawn.
    """
    with rc_context(_STYLE):
        yield
