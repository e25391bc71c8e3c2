"""The order of vendors that was measured on this machine, and that plans then prefer.

It holds for one device and its driver (a slot, or "cpu", may hold another one tomorrow), and for
the runtimes that were measured: when one of them is another version, the order is ignored, and the
vendors' own ranks count again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from .contract import Plan, record_from_json, record_to_json
from .plan import Decision
from .whole_file import write_whole

FILE = "measured_order.json"


@dataclass(frozen=True, kw_only=True)
class MeasuredVendor:
    """What a vendor was measured at."""

    vendor: str
    runtime: str
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class MeasuredOrder:
    """The vendors of one device, fastest first.

    Attributes:
        name: Of the device: its id may be a slot, or "cpu".
        what: The pipeline and size that were measured.
        at: UTC, ISO 8601.
        failed: Vendor -> runtime, of those that could not be measured: they are tried last.
    """

    device: str
    name: str
    driver: str
    vendors: tuple[MeasuredVendor, ...]
    what: str
    at: str
    failed: Mapping[str, str] = field(default_factory=dict)


def save_order(home: Path, orders: Sequence[MeasuredOrder]) -> None:
    """Stores what was measured; devices that were not measured keep what they had.

    Raises:
        OSError: The home folder cannot be written.
    """
    kept = [one for one in load_order(home) if one.device not in {new.device for new in orders}]
    document = [record_to_json(order) for order in [*kept, *orders]]
    write_whole(home / FILE, json.dumps(document, indent=1).encode())


def load_order(home: Path) -> tuple[MeasuredOrder, ...]:
    """Returns what was stored; nothing if it cannot be read."""
    try:
        data = json.loads((home / FILE).read_text(encoding="utf-8"))
        return record_from_json(tuple[MeasuredOrder, ...], data)
    except (OSError, ValueError, RecursionError):
        return ()


def forget_order(home: Path) -> bool:
    """Removes what was stored. Returns whether there was anything."""
    is_there = (home / FILE).exists()
    with suppress(FileNotFoundError):
        (home / FILE).unlink()
    return is_there


def with_measured_order(decision: Decision, orders: Sequence[MeasuredOrder]) -> Decision:
    """Returns the decision with the plans of each measured device in the measured order.

    A plan moves only among the places of its own device, and plans that were not measured keep
    theirs: what is known of one device says nothing of another. One that failed comes after those
    that did not.
    """
    plans = list(decision.plans)
    for order in orders:
        measured = {one.vendor: one for one in order.vendors}
        places = [
            index
            for index, plan in enumerate(plans)
            if plan.device.id == order.device
            and plan.state == "ready"
            and (plan.vendor in measured or order.failed.get(plan.vendor) == plan.runtime)
        ]
        there = [plans[index] for index in places if plans[index].vendor in measured]
        failed = [plans[index] for index in places if plans[index].vendor not in measured]
        if not there or not all(_still_holds(plan, order, measured) for plan in there):
            continue
        there.sort(key=lambda plan: measured[plan.vendor].step_ms)
        there[0] = _with_reason(there[0], there[1:], order, measured)
        there += [_with_failure(plan, order) for plan in failed]
        for index, plan in zip(places, there, strict=True):
            plans[index] = plan
    return replace(decision, plans=tuple(plans))


def _still_holds(plan: Plan, order: MeasuredOrder, measured: dict[str, MeasuredVendor]) -> bool:
    is_same_device = (plan.device.name, plan.device.driver) == (order.name, order.driver)
    return is_same_device and plan.runtime == measured[plan.vendor].runtime


def _with_failure(plan: Plan, order: MeasuredOrder) -> Plan:
    reason = f"it failed here on {order.at[:10]} ({order.what}), so it is tried after the others"
    return replace(plan, reasons=(reason, *plan.reasons))


def _with_reason(
    plan: Plan,
    others: Sequence[Plan],
    order: MeasuredOrder,
    measured: dict[str, MeasuredVendor],
) -> Plan:
    against = "".join(
        f", {other.vendor} {measured[other.vendor].step_ms:.3g} ms" for other in others
    )
    reason = (
        f"measured here on {order.at[:10]} ({order.what}): {measured[plan.vendor].step_ms:.3g} ms "
        f"a UNet step{against}"
    )
    return replace(plan, reasons=(reason, *plan.reasons))
