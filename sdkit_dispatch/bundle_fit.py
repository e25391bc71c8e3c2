"""Whether an engine from elsewhere can be of use on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from . import graph
from .bundle_file import Index
from .contract import BuildRequest, Device, Plan, Rejection, VendorSpec
from .detect.pci_table import known_archs
from .errors import ConfigError
from .workers import Workers


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a request could ever be made here, so that its engine would be found.

    Attributes:
        status: "unconfirmed": the vendor is not installed, and nothing else speaks against it.
        message: What does not fit, or why it cannot be known; empty if it fits.
    """

    status: Literal["fits", "unconfirmed", "target", "version"]
    message: str = ""


def fit_here(
    request: BuildRequest,
    *,
    specs: Mapping[str, VendorSpec],
    devices: Sequence[Device],
    workers: Workers,
) -> Fit:
    """Compares a request with what this version, and its vendor here, would ask for.

    The tool's own version is not compared: what decides whether an engine is found is in the
    request, and its adapter's revision rises with whatever the adapter does differently.
    """
    spec = specs.get(request.vendor)
    if spec is None:
        known = ", ".join(specs)
        return Fit(status="version", message=f"no vendor '{request.vendor}' here; known: {known}")
    revisions = (
        (f"the {spec.name} adapter's revision", request.revision, spec.revision),
        ("the revision of the graph passes", request.passes, graph.REVISION),
    )
    for what, built, here in revisions:
        if built != here:
            return Fit(status="version", message=f"built with {built} as {what}, here it is {here}")
    serving = [device for device in devices if _could_serve(spec, device)]
    if not serving:
        return Fit(status="target", message=f"no device here is one that {spec.name} serves")
    environment = workers.environment(spec)
    if isinstance(environment, Rejection):
        archs = {arch.strip() for arch in request.target.split(",")} & set(known_archs())
        if archs and not archs & {device.arch for device in serving}:
            names = ", ".join(device.arch or "unknown" for device in serving)
            return Fit(status="target", message=f"built for {request.target}; here is {names}")
        why = f"not confirmed: {environment.reason}"
        return Fit(status="unconfirmed", message=why)
    return _confirmed(request, spec, serving, workers)


def refusal_of(index: Index, fits: Mapping[str, Fit]) -> str:
    """Returns a line for every engine that does not fit; empty if all do."""
    return "".join(
        f"\n  - the {index.engines[key].request.vendor} engine {key[:12]} of "
        f"{index.engines[key].request.component}, {fit.status}: {fit.message}"
        for key, fit in fits.items()
        if fit.status in ("target", "version")
    )


def _could_serve(spec: VendorSpec, device: Device) -> bool:
    if device.kind not in spec.device_kinds:
        return False
    is_on_bus = device.kind != "cpu" and bool(spec.pci_vendors)
    return not is_on_bus or device.pci_id.partition(":")[0] in spec.pci_vendors


def _confirmed(
    request: BuildRequest, spec: VendorSpec, serving: Sequence[Device], workers: Workers
) -> Fit:
    """Asks the vendor what it would build on each device that it could serve."""
    nearest = Fit(status="target", message=f"{spec.name} serves no device here")
    for device in serving:
        try:
            plan = workers.probe(spec, device, request.precision, request.options)
        except ConfigError as error:
            return Fit(status="version", message=f"its options are not known here: {error.message}")
        if not isinstance(plan, Plan):
            nearest = Fit(status="target", message=plan.reason)
        elif (plan.runtime, plan.target) == (request.runtime, request.target):
            return Fit(status="fits")
        elif plan.target != request.target:
            here = plan.target or "any device"
            built = request.target or "any device"
            nearest = Fit(status="target", message=f"built for {built}; here it would be {here}")
        else:
            message = f"built with {request.runtime}; here is {plan.runtime}"
            return Fit(status="version", message=message)
    return nearest
