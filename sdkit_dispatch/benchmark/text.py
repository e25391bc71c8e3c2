"""A report for a terminal."""

from __future__ import annotations

from sdkit_dispatch.benchmark.records import CaseResult, Report, Row, Versus

WIDEST_REASON = 300


def print_report(report: Report) -> None:
    """Prints what a terminal has room for; the files have everything."""
    for remark in report.remarks:
        print(f"* {remark}")
    for case in report.cases:
        _print_case(case)
    if report.interrupted:
        print(f"interrupted {report.interrupted}: the figures are of the rounds until then")


def _print_case(case: CaseResult) -> None:
    spec = case.spec
    suite = f"suite {spec.suite}, " if spec.suite else ""
    print(
        f"\n{suite}{spec.width_px}x{spec.height_px}, batch {spec.batch}, {spec.steps} steps, "
        f"{spec.scheduler}"
    )
    for remark in case.remarks:
        print(f"* {remark}")
    print(
        f"{'entrant':<24}{'build':>9}{'engine':>10}{'cold':>8}{'warm':>8}{'first':>8}"
        f"{'UNet':>11}{'p90':>11}{'img/min':>10}{'peak RSS':>10}{'error':>9}"
    )
    for row in case.rows:
        if row.components or row.image:
            print(_line(row))
    for row in case.rows:
        if row.failure:
            print(f"-  {row.name}: {row.failure[:WIDEST_REASON]}")
            if row.hint:
                print(f"     -> {row.hint}")
    if case.versus:
        print("\nratios of pairs of the same round; below 1, the first is faster")
    for one in case.versus:
        print(versus_line(one))


def versus_line(one: Versus) -> str:
    """Returns one ratio with its interval."""
    ratio = one.ratio
    cpu = one.cpu_ratio
    by_cpu = f"; CPU time {cpu.median:.3f} [{cpu.low:.3f} .. {cpu.high:.3f}]" if cpu else ""
    return (
        f"  {one.of} / {one.other}, {one.what}: {ratio.median:.3f} "
        f"[{ratio.low:.3f} .. {ratio.high:.3f}] of {ratio.rounds} rounds, "
        f"{ratio.coverage:.1%} interval: {ratio.call}{by_cpu}"
    )


def _line(row: Row) -> str:
    unet = row.components.get("unet")
    error = max(row.error.values(), default=None)
    is_computed = row.images_per_minute is not None and not row.is_rate_measured
    rate = _number(row.images_per_minute, ".2f") + ("~" if is_computed else "")
    return (
        f"{row.name:<24}{_number(row.build_s, '.1f', ' s'):>9}"
        f"{_number(row.engine_bytes and row.engine_bytes / 1e6, '.1f', ' MB'):>10}"
        f"{_number(row.cold_load_s, '.2f', ' s'):>8}{_number(row.warm_load_s, '.2f', ' s'):>8}"
        f"{_number(row.first_image_s, '.2f', ' s'):>8}"
        f"{_number(unet.median_ms if unet else None, '.2f', ' ms'):>11}"
        f"{_number(unet.p90_ms if unet else None, '.2f', ' ms'):>11}{rate:>10}"
        f"{_number(row.peak_rss_bytes and row.peak_rss_bytes / 1e6, '.0f', ' MB'):>10}"
        f"{_number(error, '.1e'):>9}"
    )


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
