"""A report as CSV, and as JSON without what would tell who made it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdkit_dispatch.benchmark.records import Report, Series, report_to_json
from sdkit_dispatch.bug_report import private_words, redacted
from sdkit_dispatch.contract import Device

COLUMNS = (
    "suite",
    "width_px",
    "height_px",
    "batch",
    "steps",
    "name",
    "kind",
    "device",
    "runtime",
    "precision",
    "what",
    "median_ms",
    "p90_ms",
    "cpu_ms",
    "runs",
    "drift",
    "images_per_minute",
    "is_rate_measured",
    "build_s",
    "engine_bytes",
    "cold_load_s",
    "warm_load_s",
    "first_image_s",
    "peak_rss_bytes",
    "device_memory_bytes",
    "error",
    "failure",
)
_PATH = re.compile(r"(?<![\w.:/\\])(?:~?/|[A-Za-z]:[\\/])[^\s\"'`,;:]*[\\/]([^\s\"'`,;:/\\]+)")
"""An absolute path of two parts or more, and its last part. Addresses (https://...) are none."""


def csv_text(report: Report) -> str:
    """Returns a line for every component, and for the images, of every entrant."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in _csv_rows(report):
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    return stream.getvalue()


def _csv_rows(report: Report) -> Iterator[Mapping[str, Any]]:  # Any: str, int, float or None
    for case in report.cases:
        spec = case.spec
        for row in case.rows:
            about = {
                "suite": spec.suite,
                "width_px": spec.width_px,
                "height_px": spec.height_px,
                "batch": spec.batch,
                "steps": spec.steps,
                **{name: getattr(row, name) for name in ("name", "kind", "device", "runtime")},
                "precision": row.precision,
                "failure": " ".join(row.failure.split()),
            }
            whole = {
                name: getattr(row, name)
                for name in COLUMNS[COLUMNS.index("images_per_minute") : COLUMNS.index("error")]
            }
            image = {} if row.image is None else _series(row.image)
            yield {**about, "what": "image", **image, **whole, "error": row.image_error}
            for name, series in row.components.items():
                yield {**about, "what": name, **_series(series), "error": row.error.get(name)}


def _series(series: Series) -> dict[str, float | int | None]:
    return {
        "median_ms": series.median_ms,
        "p90_ms": series.p90_ms,
        "cpu_ms": series.cpu_ms,
        "runs": series.runs,
        "drift": series.drift.change if series.drift.is_flagged else None,
    }


def submission(report: Report, home: Path) -> str:
    """Returns the report as JSON to be sent to others: no user, host, path or serial number."""
    machine = replace(
        report.machine, devices=tuple(_without_serial(one) for one in report.machine.devices)
    )
    serials = {
        text: "<id>"
        for device in report.machine.devices
        for text in (device.uuid, device.luid)
        if text
    }
    document = report_to_json(replace(report, machine=machine))
    words = {**private_words(home), **serials}
    text = redacted(json.dumps(document, indent=1, ensure_ascii=False), words)
    return _PATH.sub(r"<path>/\1", text) + "\n"


def _without_serial(device: Device) -> Device:
    return replace(device, uuid="", luid="")
