"""Two reports against each other: what differs between the runs first, then the ratios."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sdkit_dispatch.benchmark.records import SCHEMA_VERSION, CaseResult, Report, Row, Series
from sdkit_dispatch.benchmark.statistics import Ratio, unpaired_ratio
from sdkit_dispatch.contract import record_from_json
from sdkit_dispatch.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing that both reports measured; A / B below 1 means that A is faster."""

    name: str
    what: str
    a_ms: float
    b_ms: float
    ratio: Ratio


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two reports say together.

    Attributes:
        differences: Of machines, versions and conditions, as sentences.
        only_a: Entrants of the first report alone.
    """

    differences: tuple[str, ...]
    lines: tuple[Line, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def read_report(path: Path) -> Report:
    """Reads a report that `bench` wrote.

    Raises:
        ConfigError: It is none, or of another version.
    """
    hint = "sdkit-dispatch bench --json-file FILE writes one"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be read as JSON: {error}", hint) from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(f"'{path}' has schema_version {version}, not {SCHEMA_VERSION}", hint)
    try:
        return record_from_json(Report, data)
    except ValueError as error:
        raise ConfigError(f"'{path}' is no report of a benchmark: {error}", hint) from error


def compare_reports(a: Report, b: Report) -> Comparison:
    """Compares what both measured.

    Raises:
        ConfigError: They are of different suites, or share no case.
    """
    if a.suite != b.suite:
        raise ConfigError(
            f"the reports are of different suites: '{a.suite or 'none'}' and "
            f"'{b.suite or 'none'}'; their numbers say nothing of each other",
            "run both with the same --suite",
        )
    cases_b = {_case_key(case): case for case in b.cases}
    pairs = [(case, cases_b[_case_key(case)]) for case in a.cases if _case_key(case) in cases_b]
    if not pairs:
        raise ConfigError(
            "the reports share no case: sizes, batches, steps or samplers differ",
            "run both with the same --suite",
        )
    lines: list[Line] = []
    names_a: set[str] = set()
    names_b: set[str] = set()
    for case_a, case_b in pairs:
        where = _where(case_a) if len(pairs) > 1 else ""
        rows_a, rows_b = _timed(case_a), _timed(case_b)
        names_a |= set(rows_a)
        names_b |= set(rows_b)
        for name in rows_a:
            if name in rows_b:
                lines += _lines(name, where, rows_a[name], rows_b[name])
    return Comparison(
        differences=tuple(_differences(a, b)),
        lines=tuple(lines),
        only_a=tuple(sorted(names_a - names_b)),
        only_b=tuple(sorted(names_b - names_a)),
    )


def _lines(name: str, where: str, a: Row, b: Row) -> list[Line]:
    series_a, series_b = _all_series(a), _all_series(b)
    return [
        Line(
            name=name,
            what=f"{what}{where}",
            a_ms=series_a[what].median_ms,
            b_ms=series_b[what].median_ms,
            ratio=unpaired_ratio(series_a[what].rounds_ms, series_b[what].rounds_ms),
        )
        for what in series_a
        if what in series_b
    ]


def _all_series(row: Row) -> dict[str, Series]:
    return {**row.components, **({} if row.image is None else {"image": row.image})}


def _timed(case: CaseResult) -> dict[str, Row]:
    return {row.name: row for row in case.rows if _all_series(row)}


def _case_key(case: CaseResult) -> tuple[object, ...]:
    spec = case.spec
    return (
        *(spec.width_px, spec.height_px, spec.batch, spec.steps),
        *(spec.guidance, spec.scheduler),
    )


def _where(case: CaseResult) -> str:
    return f" {case.spec.width_px}x{case.spec.height_px}/{case.spec.batch}"


def _differences(a: Report, b: Report) -> list[str]:
    facts = {
        "processor": [_processor(one) for one in (a, b)],
        "other devices": [_others(one) for one in (a, b)],
        "system": [one.machine.kernel for one in (a, b)],
        "processors": [str(one.machine.processors) for one in (a, b)],
        "threads": [str(one.threads or "the runtimes' choice") for one in (a, b)],
        "tool": [one.tool for one in (a, b)],
        "loading": [one.residency for one in (a, b)],
        "graphs": [", ".join(one.pipeline.graphs.values()) for one in (a, b)],
    }
    lines = [f"{name}: A {one}, B {other}" for name, (one, other) in facts.items() if one != other]
    versions_a, versions_b = _runtimes(a), _runtimes(b)
    lines += [
        f"{name}: A {versions_a[name]}, B {versions_b[name]}"
        for name in versions_a
        if name in versions_b and versions_a[name] != versions_b[name]
    ]
    lines += [f"A: {remark}" for remark in a.remarks] + [f"B: {remark}" for remark in b.remarks]
    lines += [f"{name} was interrupted" for name, one in (("A", a), ("B", b)) if one.interrupted]
    return lines


def _processor(report: Report) -> str:
    return next((one.name for one in report.machine.devices if one.kind == "cpu"), "unknown")


def _others(report: Report) -> str:
    names = [
        f"{one.name}{f' with driver {one.driver}' if one.driver else ''}"
        for one in report.machine.devices
        if one.kind != "cpu"
    ]
    return ", ".join(names) or "none"


def _runtimes(report: Report) -> dict[str, str]:
    return {
        row.name: " ".join(filter(None, (row.runtime, row.precision)))
        for case in report.cases
        for row in case.rows
        if row.components or row.image
    }
