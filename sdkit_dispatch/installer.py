"""Installs a vendor when it is needed, with the reference that checks its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .contract import Device, Progress, Rejection, Report, VendorSpec
from .detect import host
from .detect.support import variant_for
from .env import InstallPlan, install, plan_install
from .errors import VendorEnvError
from .reference import VENDOR as REFERENCE_VENDOR
from .workers import Workers


@dataclass(frozen=True, kw_only=True)
class Installer:
    """What is installed where, and whether more may be.

    Attributes:
        home: Folder of the environments.
        workers: Told of a new environment.
        devices: Of this machine: their drivers decide between builds of a runtime.
    """

    home: Path
    workers: Workers
    specs: Mapping[str, VendorSpec]
    devices: Sequence[Device]
    may_install: bool

    def plans(self, spec: VendorSpec, report: Report) -> list[InstallPlan]:
        """Returns what installing a vendor fetches.

        Raises:
            VendorEnvError: The requirements cannot be satisfied.
        """
        return [
            plan_install(self.suited(one), home=self.home, report=report)
            for one in self._missing(spec)
        ]

    def suited(self, spec: VendorSpec) -> VendorSpec:
        """Returns a vendor with the build of its runtime that the driver here can serve."""
        name = variant_for(spec.name, self.devices, host())
        return spec.of_variant(name) if name in spec.variants else spec

    def install(self, spec: VendorSpec, report: Report) -> None:
        """Installs a vendor.

        Raises:
            VendorEnvError: It may not be, or cannot.
        """
        if not self.may_install:
            raise VendorEnvError(
                f"the vendor '{spec.name}' is not installed",
                f"sdkit-dispatch vendors install {spec.name}",
            )
        for one in map(self.suited, self._missing(spec)):
            plan = plan_install(one, home=self.home, report=report)
            report(Progress(phase=f"install {plan.summary}"))
            install(one, home=self.home, report=report, plan=plan)
            self.workers.forget(one)

    def _missing(self, spec: VendorSpec) -> list[VendorSpec]:
        reference = self.specs.get(REFERENCE_VENDOR)
        needed = [spec] if reference is None or reference == spec else [spec, reference]
        return [
            one
            for one in needed
            if one is spec or isinstance(self.workers.environment(one), Rejection)
        ]
