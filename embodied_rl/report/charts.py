"""Charts as SVG with the colours of the page around them, so that one serves light and dark; and ``curve.png``."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from embodied_rl.report.curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#3d3d9e")
"""Okabe and Ito's, told apart by colour-blind people, too; the last two darker, to be seen on white."""
_TEXT, _GRID = "#010101", "#030303"
_SERIES: Final = tuple(f"#0a0a{index:02x}" for index in range(len(COLOURS)))
_VARIABLES: Final = {_TEXT: "var(--muted)", _GRID: "var(--line)"} | {
    colour: f"var(--c{index})" for index, colour in enumerate(_SERIES)
}
_WIDTH, _HEIGHT = 4.2, 2.5
_INCH: Final = 72
"""Points of an inch, the unit of SVG here: a chart's width in pixels where nothing scales it."""
_FEW: Final = 30
"""Up to so many points have dots."""


def line_chart(curves: Sequence[Curve], *, x: str, percent: bool = False, unit: float = 1.0, label: str) -> str:
    """A metric's curves, the groups by colour: mean, interval, and the single runs thin.

    Args:
        x: name of the axis.
        percent: values are shares.
        unit: what the places on the axis are divided by.
        label: for who cannot see it.
    """
    figure, axes = _figure(_TEXT, _GRID)
    _lines(axes, curves, _SERIES, percent=percent, unit=unit)
    _scale(axes, x=x, percent=percent)
    return _svg(figure, label)


def stack_chart(steps: Sequence[float], parts: Mapping[str, Sequence[float]], *, label: str) -> str:
    """Seconds of each part of a step, one on another."""
    figure, axes = _figure(_TEXT, _GRID)
    colours = [_SERIES[index % len(_SERIES)] for index in range(len(parts))]
    if len(steps) > 1:
        axes.stackplot(steps, *parts.values(), colors=colours, alpha=0.85, linewidth=0)
    else:
        below = 0.0
        for colour, [value] in zip(colours, parts.values(), strict=True):
            axes.bar(steps, value, bottom=below, color=colour, width=0.5)
            below += value
    _scale(axes, x="training step")
    axes.set_ylim(bottom=0)
    return _svg(figure, label)


def write_picture(path: Path, panels: Sequence[tuple[str, float, Sequence[Curve]]], *, title: str, y: str) -> None:
    """The curves of success as a picture.

    Args:
        panels: each axis' name and unit, and its curves.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (name, unit, curves) in zip(every, panels, strict=True):
        _lines(axes, curves, COLOURS, percent=True, unit=unit)
        _scale(axes, x=name, percent=True)
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    every[0].set_ylabel(y)
    if every[0].get_legend_handles_labels()[1]:
        every[-1].legend(frameon=False, fontsize=8, loc="best")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


def _figure(text: str, grid: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    figure.patch.set_visible(False)
    axes: Any = figure.add_axes((0.115, 0.175, 0.86, 0.785))
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(grid)
    axes.tick_params(colors=text, labelsize=8.5, length=0, pad=4)
    axes.xaxis.label.set_color(text)
    axes.xaxis.label.set_size(8.5)
    axes.grid(axis="y", color=grid, linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def _lines(axes: Any, curves: Sequence[Curve], colours: Sequence[str], *, percent: bool, unit: float) -> None:
    factor = 100.0 if percent else 1.0
    for index, curve in enumerate(curves):
        colour, dashes = colours[index % len(colours)], ("-", "--", ":")[index // len(colours) % 3]
        x = [place / unit for place in curve.mean.x]
        if curve.low is not None and curve.high is not None:
            low, high = ([factor * value for value in side] for side in (curve.low, curve.high))
            if percent:
                low, high = [max(value, 0.0) for value in low], [min(value, 100.0) for value in high]
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        for single in curve.singles:
            axes.plot(
                [p / unit for p in single.x], [factor * y for y in single.y], dashes, color=colour, lw=0.8, alpha=0.45
            )
        marker = "o" if len(x) <= _FEW else ""
        y = [factor * value for value in curve.mean.y]
        axes.plot(x, y, dashes, color=colour, lw=1.8, marker=marker, ms=3.2, label=curve.name)


def _scale(axes: Any, *, x: str, percent: bool = False) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    thousands = EngFormatter(sep="")
    short = FuncFormatter(lambda value, _: thousands(value) if abs(value) >= 1000 else f"{value:.4g}".replace("-", "−"))

    axes.set_xlabel(x)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer="step" in x, min_n_ticks=1))
    axes.xaxis.set_major_formatter(short)
    axes.margins(x=0.02)
    if percent:
        axes.set_ylim(-3, 103)  # points at 0 and 100 % whole
        axes.set_yticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(short)
        axes.margins(y=0.08)


def _svg(figure: Figure, label: str) -> str:
    """SVG to stand in a page: no header, size or names of its own, colours by the page's variables."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "embodied_rl"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<(g|path) id="(?![mp][0-9a-f]{10}")[^"]*"', r"<\1", text)
    text = re.sub(r' font-family: [^";]*;| transform="rotate\(-0 [^"]*"|<g/>', "", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    box = f"0 0 {_WIDTH * _INCH:g} {_HEIGHT * _INCH:g}"
    text = re.sub(r"<svg [^>]*>", f'<svg viewBox="{box}" role="img" aria-label="{_quoted(label)}">', text, count=1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = text.replace("xlink:href", "href")
    return re.sub(r"\n\s*", "\n", text)


def _quoted(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
