"""The charts of a report, as SVG text to be put into a page.

Every colour is a placeholder that becomes a CSS variable of the page, so that one drawing serves
light and dark. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from sdkit_dispatch.benchmark.records import CaseResult, Row

INK, SOFT, GRID = "#0a0b01", "#0a0b02", "#0a0b03"
KINDS = {"vendor": "#0a0c01", "peer": "#0a0c02", "bare": "#0a0c03"}
STYLES = {"vendor": "-", "peer": ":", "bare": "--"}
LINES = tuple(f"#0a0d{index:02x}" for index in range(8))
CSS_NAMES = {
    INK: "--ink",
    SOFT: "--soft",
    GRID: "--grid",
    KINDS["vendor"]: "--vendor",
    KINDS["peer"]: "--peer",
    KINDS["bare"]: "--bare",
    **{colour: f"--line{index}" for index, colour in enumerate(LINES)},
}
WIDE_IN, NARROW_IN = 10.4, 5.6
"""Of a chart over the whole page, and of one of two beside each other."""
ROW_IN = 0.34
SETTINGS: Any = {  # Any: matplotlib types every key of it
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": INK,
    "ytick.major.size": 0,
    "xtick.major.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
}
_ID = re.compile(
    r' id="(?:figure|patch|axes|matplotlib|text|line2d|xtick|ytick|[A-Za-z]*Coll)[^"]*"'
)


def rate_chart(rows: Sequence[Row]) -> str:
    """Returns bars of images per minute, the fastest on top; empty if nobody made any."""
    shown = [row for row in rows if row.images_per_minute is not None and row.kind != "bare"]
    shown.sort(key=lambda row: row.images_per_minute or 0.0)
    values = [row.images_per_minute or 0.0 for row in shown]
    labels = [
        f"{rate_words(value)}{'' if row.is_rate_measured else ' ~'}"
        for row, value in zip(shown, values, strict=True)
    ]
    return _bars(shown, values, labels, unit="images per minute")


def component_chart(rows: Sequence[Row], component: str) -> str:
    """Returns bars of a component's median, with a whisker to its 90th percentile."""
    shown = [row for row in rows if component in row.components]
    shown.sort(key=lambda row: -row.components[component].median_ms)
    series = [row.components[component] for row in shown]
    return _bars(
        shown,
        [one.median_ms for one in series],
        [duration(one.median_ms) for one in series],
        unit="ms; the thin line ends at the 90th percentile",
        width_in=NARROW_IN,
        whiskers=[one.p90_ms for one in series],
    )


def _bars(
    rows: Sequence[Row],
    values: Sequence[float],
    labels: Sequence[str],
    *,
    unit: str,
    width_in: float = WIDE_IN,
    whiskers: Sequence[float] = (),
) -> str:
    if not rows:
        return ""
    figure, axes = _figure(0.75 + ROW_IN * len(rows), width_in=width_in)
    places = range(len(rows))
    axes.barh(places, values, height=0.62, color=[KINDS[row.kind] for row in rows])
    for place, (value, end) in enumerate(zip(values, whiskers, strict=False)):
        if end > value:
            axes.plot([value, end], [place, place], color=SOFT, linewidth=1.2, zorder=3)
    largest = max([*values, *whiskers])
    for place, label in enumerate(labels):
        end = max(values[place], whiskers[place] if whiskers else 0.0)
        axes.text(end + largest * 0.012, place, label, va="center", color=INK, fontweight="bold")
    axes.set_yticks(places, [_label(row) for row in rows])
    axes.set_xlim(0, largest * (1.14 if width_in == WIDE_IN else 1.25))
    axes.locator_params(axis="x", nbins=8 if width_in == WIDE_IN else 5)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(unit, loc="left")
    axes.grid(axis="x")
    axes.spines["bottom"].set_visible(False)
    return _svg(figure)


def rounds_chart(case: CaseResult, what: str = "unet") -> str:
    """Returns lines of every entrant's rounds over its own median: what the machine did."""
    shown = [row for row in case.rows if what in row.components][: len(LINES)]
    if not shown or len(shown[0].components[what].rounds_ms) < 2:
        return ""
    figure, axes = _figure(3.1)
    for row, colour in zip(shown, LINES, strict=False):
        series = row.components[what]
        relative = [value / series.median_ms for value in series.rounds_ms]
        axes.plot(
            range(1, len(relative) + 1),
            relative,
            color=colour,
            linewidth=1.8,
            marker="o",
            markersize=3.5,
            label=_label(row),
            linestyle=STYLES[row.kind],
        )
    axes.axhline(1.0, color=SOFT, linewidth=0.8)
    axes.set_xlabel("round", loc="left")
    axes.set_ylabel("of its own median")
    axes.tick_params(axis="y", colors=SOFT)
    axes.grid(axis="y")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes)
    return _svg(figure)


def ratio_chart(case: CaseResult) -> str:
    """Returns a point and an interval for every ratio; left of 1 the first is faster."""
    shown = list(reversed(case.versus))
    if not shown:
        return ""
    figure, axes = _figure(0.9 + 0.3 * len(shown))
    for place, one in enumerate(shown):
        is_clear = one.ratio.call in ("faster", "slower")
        colour = KINDS["vendor"] if is_clear else SOFT
        axes.plot([one.ratio.low, one.ratio.high], [place, place], color=colour, linewidth=2)
        axes.plot([one.ratio.median], [place], "o", color=colour, markersize=6)
    axes.axvline(1.0, color=INK, linewidth=1)
    labels = {row.name: _label(row) for row in case.rows}
    names = [f"{one.of} / {labels.get(one.other, one.other)}, {one.what}" for one in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.set_xscale("log")
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(LogLocator(base=10, subs=()))
    low = min(one.ratio.low for one in shown)
    high = max(one.ratio.high for one in shown)
    axes.set_xlim(min(0.8, low * 0.9), max(1.25, high * 1.1))
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("time of the first over time of the second; left of 1 is faster", loc="left")
    axes.grid(axis="x")
    axes.spines["bottom"].set_visible(False)
    return _svg(figure)


def grid_chart(cases: Sequence[CaseResult]) -> str:
    """Returns lines of images per minute over the cases; empty unless there are several."""
    if len(cases) < 2:
        return ""
    labels = {row.name: _label(row) for case in cases for row in case.rows}
    names = list(
        dict.fromkeys(
            row.name
            for case in cases
            for row in case.rows
            if row.images_per_minute is not None and row.kind != "bare"
        )
    )[: len(LINES)]
    figure, axes = _figure(3.1)
    for name, colour in zip(names, LINES, strict=False):
        points = [
            (place, row.images_per_minute)
            for place, case in enumerate(cases)
            for row in case.rows
            if row.name == name and row.images_per_minute is not None
        ]
        axes.plot(
            *zip(*points, strict=True), color=colour, linewidth=2, marker="o", label=labels[name]
        )
    ticks = [
        f"{case.spec.width_px}x{case.spec.height_px}\nbatch {case.spec.batch}" for case in cases
    ]
    axes.set_xticks(range(len(cases)), ticks)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("images per minute")
    axes.tick_params(axis="y", colors=SOFT)
    axes.grid(axis="y")
    _legend(axes)
    return _svg(figure)


def _label(row: Row) -> str:
    """Names a row so that a chart by itself says whose it is."""
    return f"{row.name} (peer)" if row.kind == "peer" else row.name


def rate_words(rate: float) -> str:
    """Returns "12.3" or "1346"."""
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def duration(value_ms: float) -> str:
    """Returns "12.3 ms" or "4.56 s"."""
    return f"{value_ms:.3g} ms" if value_ms < 1000 else f"{value_ms / 1000:.3g} s"


def _legend(axes: Any) -> None:  # Any: matplotlib's Axes
    axes.legend(
        frameon=False,
        labelcolor=INK,
        ncols=4,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        borderaxespad=0.2,
    )


def _figure(
    height_in: float, *, width_in: float = WIDE_IN
) -> tuple[Any, Any]:  # Any: matplotlib's Figure and Axes
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        return figure, figure.subplots()


def _svg(figure: Any) -> str:  # Any: matplotlib's Figure
    import matplotlib

    stream = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    text = stream.getvalue()
    text = _ID.sub("", text[text.index("<svg") :])
    for colour, name in CSS_NAMES.items():
        text = text.replace(colour, f"var({name})")
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"'DejaVu Sans'(, sans-serif)?", "inherit", text)
    return re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1
    )
