"""A report as one HTML file: charts, tables and its own JSON; it fetches nothing."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sdkit_dispatch.benchmark.charts import (
    component_chart,
    duration,
    grid_chart,
    rate_chart,
    rate_words,
    ratio_chart,
    rounds_chart,
)
from sdkit_dispatch.benchmark.records import CaseResult, MachineState, Report, Row, report_to_json
from sdkit_dispatch.errors import ConfigError

TEMPLATES = Path(__file__).parents[1] / "_data" / "report"
LIBRARIES = ("jinja2", "matplotlib")
FORMS: Mapping[str, Callable[[Any], str]] = {  # Any: a number
    "rate": rate_words,
    "ms": lambda value: f"{value:.2f} ms" if value < 1000 else f"{value / 1000:.3f} s",
    "s": lambda value: f"{value:.2f} s",
    "MB": lambda value: f"{value / 1e6:.1f} MB",
    "GB": lambda value: f"{value / 1e9:.1f} GB",
    "levels": lambda value: f"{value:.2f}",
    "e": lambda value: f"{value:.1e}",
    "ratio": lambda value: f"{value:.3f}",
    "percent": lambda value: f"{value:.1%}",
    "count": lambda value: f"{value:d}",
}
"""How a figure is written; a test reads the cells back and compares them with the JSON."""


def require_libraries() -> None:
    """Refuses to begin what could not be written at the end.

    Raises:
        ConfigError: A library of the extra `report` is missing.
    """
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--html needs {' and '.join(missing)}, which is not installed",
            "pip install 'sdkit-dispatch[report]'",
        )


def page(report: Report) -> str:
    """Returns the HTML text.

    Raises:
        ConfigError: A library of the extra `report` is missing.
    """
    require_libraries()
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sentence"] = lambda text: text[:1].upper() + text[1:] + "."

    def cell(value: Any, path: str, form: str) -> Markup:  # Any: a number, None or undefined
        if value is None or isinstance(value, jinja2.Undefined):
            return Markup("<td></td>")
        return Markup('<td data-path="{}" data-form="{}">{}</td>').format(
            path, form, FORMS[form](value)
        )

    document = json.dumps(report_to_json(report), allow_nan=False).replace("<", "\\u003c")
    return environment.get_template("report.html.j2").render(
        report=report,
        title=_title(report),
        machine_line=_machine_line(report),
        states_line=_states_line(report.states),
        tiles=_tiles(report),
        grid=Markup(grid_chart(report.cases)),
        cases=[_case(case, Markup) for case in report.cases],
        cell=cell,
        json=Markup(document),
    )


def _case(case: CaseResult, safe: Any) -> dict[str, Any]:  # Any: markupsafe.Markup; a context
    names = list(dict.fromkeys(name for row in case.rows for name in row.components))
    names.sort(key=lambda name: name != "unet")
    return {
        "spec": case.spec,
        "remarks": case.remarks,
        "rows": case.rows,
        "versus": case.versus,
        "rate": safe(rate_chart(case.rows)),
        "has_computed": any(
            row.images_per_minute is not None and not row.is_rate_measured and row.kind != "bare"
            for row in case.rows
        ),
        "components": [
            {"name": _words(name), "svg": safe(component_chart(case.rows, name))} for name in names
        ],
        "ratio": safe(ratio_chart(case)),
        "rounds": safe(rounds_chart(case)),
        "ran": [_ran(row) for row in case.rows if row.components or row.image],
        "failed": [row for row in case.rows if row.failure],
    }


def _words(component: str) -> str:
    return {"unet": "UNet step", "vae_decoder": "Decoder"}.get(
        component, component.replace("_", " ").capitalize()
    )


def _ran(row: Row) -> dict[str, str]:
    facts = row.ran.get("unet") or next(iter(row.ran.values()), {})
    return {
        "name": row.name,
        "runtime": row.runtime,
        "device": facts.get("device", row.device),
        "precision": facts.get("precision", row.precision),
        "note": row.note,
    }


def _title(report: Report) -> str:
    device = _main_device(report)
    what = f"suite {report.suite}" if report.suite else report.pipeline.name
    return f"Stable Diffusion on {device}: {what}"


def _main_device(report: Report) -> str:
    used = [row.device for case in report.cases for row in case.rows if row.components]
    names = {device.id: device.name for device in report.machine.devices}
    return names.get(used[0], used[0]) if used else report.machine.platform


def _machine_line(report: Report) -> str:
    machine = report.machine
    devices = ", ".join(
        f"{device.name}{f' (driver {device.driver})' if device.driver else ''}"
        for device in machine.devices
    )
    return f"{devices} · {machine.processors} processors · {machine.kernel}"


def _tiles(report: Report) -> list[dict[str, str]]:
    """Returns the answers most people look for, of the first case."""
    tiles: list[dict[str, str]] = []
    if not report.cases:
        return tiles
    case = report.cases[0]
    rated = [row for row in case.rows if row.kind == "vendor" and row.images_per_minute]
    if rated:
        best = max(rated, key=lambda row: row.images_per_minute or 0.0)
        sign = "" if best.is_rate_measured else "~"
        tiles.append(
            {
                "label": "fastest vendor",
                "value": best.name,
                "detail": f"{sign}{FORMS['rate'](best.images_per_minute)} images a minute",
            }
        )
    timed = [row for row in case.rows if row.kind == "vendor" and "unet" in row.components]
    if timed:
        quick = min(timed, key=lambda row: row.components["unet"].median_ms)
        series = quick.components["unet"]
        tiles.append(
            {
                "label": "quickest UNet step",
                "value": duration(series.median_ms),
                "detail": f"{quick.name}, p90 {duration(series.p90_ms)}",
            }
        )
        first = [row for row in timed if row.first_image_s is not None]
        if first:
            soonest = min(first, key=lambda row: row.first_image_s or 0.0)
            tiles.append(
                {
                    "label": "first image from nothing",
                    "value": duration(1000 * (soonest.first_image_s or 0.0)),
                    "detail": soonest.name,
                }
            )
    peers = [
        one
        for one in case.versus
        if rated and any(row.name == one.other and row.kind == "peer" for row in case.rows)
    ]
    peers = [one for one in peers if one.of == best.name]
    if peers:
        near = max(peers, key=lambda one: (one.what == "image", one.ratio.median))
        tiles.append(
            {
                "label": f"time against {near.other}",
                "value": f"{near.ratio.median:.2f}×",
                "detail": f"{near.of}, {near.what}; {near.ratio.call}",
            }
        )
    return tiles


def _states_line(states: tuple[MachineState, ...]) -> str:
    loads = [one.load for one in states if one.load is not None]
    others = [one.others_cpu for one in states if one.others_cpu is not None]
    words = []
    if loads:
        words.append(f"Load average {min(loads):.1f} to {max(loads):.1f}.")
    if others:
        words.append(f"Other programs kept up to {max(others):.1f} processors busy.")
    if governor := next((one.governor for one in states if one.governor), ""):
        words.append(f"Governor {governor}.")
    return " ".join(words)
