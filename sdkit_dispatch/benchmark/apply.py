"""What a report says of the order of vendors, for `plan` to prefer."""

from __future__ import annotations

from sdkit_dispatch.benchmark.records import CaseResult, Report, Row
from sdkit_dispatch.errors import ConfigError
from sdkit_dispatch.measured_order import MeasuredOrder, MeasuredVendor


def order_from_report(report: Report) -> tuple[MeasuredOrder, ...]:
    """Returns an order for every device on which two vendors or more were tried.

    The first case counts: it is the size that the user asked for first.

    Raises:
        ConfigError: No device has two.
    """
    orders = [order for case in report.cases[:1] for order in _orders(report, case)]
    if not orders:
        raise ConfigError(
            "there is no order to apply: fewer than two vendors were tried on one device",
            "sdkit-dispatch bench --vendors all --apply",
        )
    return tuple(orders)


def _orders(report: Report, case: CaseResult) -> list[MeasuredOrder]:
    by_device: dict[str, list[Row]] = {}
    failed: dict[str, dict[str, str]] = {}
    for row in case.rows:
        if row.kind == "vendor" and not row.failure and "unet" in row.components:
            by_device.setdefault(row.device, []).append(row)
        elif row.kind == "vendor" and row.failure and row.runtime:  # it was there, and tried
            failed.setdefault(row.device, {})[row.vendor or row.name] = row.runtime
    known = {device.id: device for device in report.machine.devices}
    spec = case.spec
    return [
        MeasuredOrder(
            device=device,
            name=known[device].name,
            driver=known[device].driver,
            vendors=tuple(
                MeasuredVendor(
                    vendor=row.vendor or row.name,
                    runtime=row.runtime,
                    step_ms=row.components["unet"].median_ms,
                )
                for row in sorted(rows, key=lambda row: row.components["unet"].median_ms)
            ),
            what=f"{report.pipeline.name}, {spec.width_px}x{spec.height_px}",
            at=report.created_at,
            failed=failed.get(device, {}),
        )
        for device, rows in by_device.items()
        if len(rows) + len(failed.get(device, {})) > 1 and device in known
    ]
