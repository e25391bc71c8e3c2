"""The document that an installer reads: what would run here, why, how big it is, and how to get it.

Its JSON schema is `_data/schemas/plan.schema.json`; the README beside it has examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .contract import Device, Rejection
from .detect.host import Host
from .detect.support import install_sizes
from .failures import Failure, standing
from .plan import Decision

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class InstallEstimate:
    """What it takes to have a vendor.

    Attributes:
        command: Installs it; `vendors install` asks the index for exact sizes first.
        download_bytes: About, as measured once; None if nobody measured it.
        disk_bytes: The same.
        measured: Where and when: "linux-x86_64, 2026-11-30"; empty if not.
    """

    vendor: str
    is_installed: bool
    command: str
    download_bytes: int | None = None
    disk_bytes: int | None = None
    measured: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The answer of `plan --json`.

    Attributes:
        host: The operating system and the interpreter.
        devices: Everything that was found, usable or not, the processor last.
        decision: Plans, best first, and one rejection for every other pair.
        installs: One for every vendor of `decision.plans`, in that order.
        failures: What failed here before and is not tried again until the device's driver or the
            vendor's runtime changes, or `build --retry` is run.
    """

    host: Host
    devices: tuple[Device, ...]
    decision: Decision
    installs: tuple[InstallEstimate, ...]
    failures: tuple[Failure, ...] = ()
    schema_version: int = SCHEMA_VERSION


def plan_report(
    host: Host,
    devices: Sequence[Device],
    decision: Decision,
    states: Mapping[str, str | Rejection],
    *,
    failures: Iterable[Failure] = (),
) -> PlanReport:
    """Returns the document; `states` is as `make_plans` has them, `failures` all that are known."""
    names = dict.fromkeys(plan.vendor for plan in decision.plans)
    return PlanReport(
        host=host,
        devices=tuple(devices),
        decision=decision,
        installs=tuple(_estimate(name, states) for name in names),
        failures=standing(failures, devices, decision.plans),
    )


def _estimate(vendor: str, states: Mapping[str, str | Rejection]) -> InstallEstimate:
    size = install_sizes().get(vendor)
    return InstallEstimate(
        vendor=vendor,
        is_installed=states.get(vendor) == "ready",
        command=f"sdkit-dispatch vendors install {vendor}",
        download_bytes=size.download_mb * 10**6 if size else None,
        disk_bytes=size.disk_mb * 10**6 if size else None,
        measured=f"{size.platform}, {size.date}" if size else "",
    )
