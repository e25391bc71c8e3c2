"""Devices x vendors -> the plans, best first, and a reason for every "no".

Pure: what is installed, what a vendor says of a device and what failed before are arguments. The
order is the ladder of the design: a vendor engine on a discrete GPU, ggml on it, the same for an
integrated GPU, then the CPU; on one device by `VendorSpec.rank`, which is data. A neural processor
is used only when it is named.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .contract import Device, Plan, Precision, Rejection, VendorSpec
from .detect.choice import select_devices
from .detect.host import Host
from .detect.pci_table import maker_of
from .detect.support import (
    Candidate,
    blocking_problems,
    engine_labels,
    engines_for,
)
from .errors import ConfigError

Options = Mapping[str, Any]
"""A vendor's own options (`Any`: each vendor owns its values)."""
VendorProbe = Callable[[VendorSpec, Device, Precision | None, Options], Plan | Rejection]
"""Asks an installed vendor, in its worker: `Vendor.probe`, then `Vendor.plan`."""

_Against = tuple[str, str, str]
"""Code, reason and hint of a rejection."""
READY_STATES = ("ready", "installed")
INSTALLABLE_STATES = ("installable", "update_required")
FALLBACK_ENGINE = "ggml"
"""On every kind of device it comes after all others."""
TIERS = {"discrete": 0, "integrated": 2, "npu": 4, "cpu": 6}
TRIVIAL = ("other-kind", "other-maker", "platform")
"""Codes that say no more than that a vendor is for something else."""
UNCHANGEABLE = frozenset(
    {"other-kind", "other-maker", "platform", "arch", "wsl", "not-selected"}
    | {"not-in-this-release", "only-when-named", "intel-mac"}
)
"""Codes of a "no" that nothing the user does here would change."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What can run here, and why nothing else does.

    Attributes:
        plans: Best first; a plan whose state is "installable" is confirmed once it is installed.
        rejections: One for every pair of device and vendor that is not a plan.
        advice: What would change the answer, most useful first.
    """

    plans: tuple[Plan, ...]
    rejections: tuple[Rejection, ...]
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """A vendor that the table and its spec let serve a device; the vendor is not asked yet.

    Attributes:
        order: Place on the ladder, lowest first.
    """

    device: Device
    spec: VendorSpec
    candidate: Candidate | None
    is_ready: bool
    order: tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """What the user asks for, and what is known of the vendors without asking them."""

    gpu: str
    chosen: frozenset[str]
    vendor: str | None
    states: Mapping[str, str | Rejection]
    forced: frozenset[str] = frozenset()


def make_plans(
    devices: Sequence[Device],
    host: Host,
    specs: Sequence[VendorSpec],
    *,
    gpu: str = "auto",
    vendor: str | None = None,
    precision: Precision | None = None,
    options: Mapping[str, Options] | None = None,
    env_states: Mapping[str, str | Rejection] | None = None,
    probe: VendorProbe,
    may_install: bool = True,
) -> Decision:
    """Judges every device with every vendor, those of the support table included.

    Args:
        devices: As `detect.detect()` lists them.
        host: As `detect.host()` says it.
        specs: The vendors of this release; the table's other engines are rejected with a reason.
        gpu: "auto"; "cpu"; "npu"; "gpu:N", the N-th GPU of `devices`; a device id; or a piece of a
            name ("4090"). A choice is strict: nothing falls back to a device that was not chosen.
        vendor: Only this one; the one way to use a vendor without a rank.
        precision: None leaves it to the vendor.
        options: Vendor -> its own options. With `force: true` a vendor is asked about a device that
            it would take, but that its makers do not list.
        env_states: Vendor -> "ready" (or "installed"), "installable", "update_required", "broken",
            "unsupported", or why no environment can serve it; one that is missing is installable.
        probe: Called for ready vendors only, in the order of the ladder.
        may_install: Without leave to install, what is ready comes before what would be better.

    Raises:
        ConfigError: `gpu` or `vendor` names nothing, or several devices.
    """
    by_name = {spec.name: spec for spec in specs}
    if vendor is not None:
        check_vendor(vendor, [*by_name, *engine_labels()])
    wish = _Wish(
        gpu=gpu,
        chosen=frozenset(device.id for device in select_devices(devices, gpu)),
        vendor=vendor,
        states=env_states or {},
        forced=frozenset(name for name, own in (options or {}).items() if own.get("force") is True),
    )
    offers: list[_Offer] = []
    rejections: list[Rejection] = []
    for position, device in enumerate(devices):
        for name, verdict in _table_verdicts(device, host, specs).items():
            judged = _judge(device, host, name, by_name.get(name), verdict, wish, position)
            if isinstance(judged, Rejection):
                rejections.append(judged)
            else:
                offers.append(judged)
    # Without leave to install, the best that is installed serves.
    offers.sort(key=lambda offer: (not (may_install or offer.is_ready), offer.order))
    plans, refused = _plans_from_offers(offers, precision, options or {}, probe)
    rejections += refused
    advice = _advice(devices, wish, offers, plans, rejections, may_install=may_install)
    return Decision(plans=tuple(plans), rejections=tuple(rejections), advice=advice)


def check_vendor(name: str, known: Sequence[str]) -> None:
    """Refuses the name of a vendor that nobody knows.

    Raises:
        ConfigError: With the known ones, the nearest ahead.
    """
    if name in known:
        return
    unique = sorted(set(known))
    near = difflib.get_close_matches(name, unique, n=1, cutoff=0.5)
    raise ConfigError(
        f"vendor {name!r} is unknown; there are {', '.join(unique)}",
        f"did you mean {near[0]}?" if near else "see `sdkit-dispatch vendors list`",
    )


def unsupported_vendors(
    devices: Sequence[Device], host: Host, specs: Sequence[VendorSpec]
) -> dict[str, Rejection]:
    """Returns the vendors that serve no device here, installed or not, and the nearest reason."""

    def never(
        spec: VendorSpec, device: Device, precision: Precision | None, own: Options
    ) -> Plan | Rejection:
        raise AssertionError("nothing counts as installed")

    found: dict[str, Rejection] = {}
    for spec in specs:
        decision = make_plans(devices, host, specs, vendor=spec.name, probe=never)
        noes = [one for one in decision.rejections if one.vendor == spec.name]
        noes.sort(key=lambda one: one.code in TRIVIAL)
        if noes and not any(plan.vendor == spec.name for plan in decision.plans):
            reachable = [one for one in noes if one.code == "only-when-named"]
            if not reachable:
                found[spec.name] = noes[0]
    return found


def explain_rejections(decision: Decision) -> str:
    """Returns the message of a `NoVendorError`: every reason, by device, and what could serve."""
    lines = ["no vendor can run this here:"]
    for device in dict.fromkeys(rejection.device for rejection in decision.rejections):
        here = [one for one in decision.rejections if one.device == device]
        told = [one for one in here if one.code != "not-selected"]
        # The nearest reasons first: that something is for other hardware says little.
        told.sort(key=lambda one: one.code in TRIVIAL)
        lines.append(f"  {device}")
        lines += [f"    {one.vendor}: {one.reason} [{one.code}]" for one in told]
        left_out = [one.vendor for one in here if one.code == "not-selected"]
        if left_out:
            lines.append(f"    not chosen, but not ruled out: {', '.join(left_out)}")
    return "\n".join([*lines, *(f"  to change that: {advice}" for advice in decision.advice)])


def _table_verdicts(
    device: Device, host: Host, specs: Sequence[VendorSpec]
) -> dict[str, Candidate | Rejection | None]:
    """Returns the table's word on each vendor; None for one that the table does not know.

    Of the backends of one vendor the best counts; if none serves, the one that came nearest.
    """
    verdicts: dict[str, Candidate | Rejection | None] = {spec.name: None for spec in specs}
    for verdict in engines_for(device, host):
        name = verdict.engine if isinstance(verdict, Candidate) else verdict.vendor
        before = verdicts.get(name)
        is_better = isinstance(before, Rejection) and before.code in TRIVIAL
        if before is None or is_better:
            verdicts[name] = verdict
    return verdicts


def _judge(
    device: Device,
    host: Host,
    name: str,
    spec: VendorSpec | None,
    verdict: Candidate | Rejection | None,
    wish: _Wish,
    position: int,
) -> _Offer | Rejection:
    """Returns the offer of a vendor for a device, or the first reason against it."""
    if isinstance(verdict, Rejection):
        if verdict.code != "needs-force" or name not in wish.forced:
            return verdict
        verdict = None  # as if the table did not know the vendor: its adapter decides
    if spec is None:
        no = (
            "not-in-this-release",
            f"{engine_labels()[name]} supports {device.name}, but this release of sdkit-dispatch "
            "has no adapter for it yet",
        )
        return Rejection(vendor=name, code=no[0], reason=no[1], device=device.id)
    state = wish.states.get(name, "installable")
    against = (
        _spec_mismatch(device, host, spec)
        or (_blocking_problem(device) if verdict is None else None)
        or _not_wanted(device, spec, wish)
        or _unusable(spec, state)
    )
    if against is not None:
        code, reason, hint = against
        return Rejection(vendor=name, code=code, reason=reason, hint=hint, device=device.id)
    return _Offer(
        device=device,
        spec=spec,
        candidate=verdict,
        is_ready=state in READY_STATES,
        order=_order(device, spec, verdict, position),
    )


def _not_wanted(device: Device, spec: VendorSpec, wish: _Wish) -> _Against | None:
    """Says what in the user's choice leaves this pair out."""
    if wish.vendor is not None and spec.name != wish.vendor:
        return "not-selected", f"{wish.vendor} was asked for", ""
    if spec.rank is None and wish.vendor != spec.name:
        flag = f"--vendor {spec.name}"
        return "only-when-named", f"{spec.name} is used only when it is named: {flag}", ""
    if device.id not in wish.chosen:
        return "not-selected", f"the choice {wish.gpu!r} leaves {device.name} out", ""
    if device.kind == "npu" and wish.gpu.strip().lower() in ("", "auto"):
        return (
            "only-when-named",
            f"{device.name} is used only when it is named: it takes FP16 and static shapes only, "
            "and is slower than a GPU",
            "--gpu npu",
        )
    return None


def _unusable(spec: VendorSpec, state: str | Rejection) -> _Against | None:
    """Says what is wrong with the vendor's environment."""
    if isinstance(state, Rejection):
        return state.code, state.reason, state.hint
    if state in READY_STATES or state in INSTALLABLE_STATES:
        return None
    hint = f"sdkit-dispatch vendors install {spec.name}" if state == "broken" else ""
    return f"env-{state}", f"the environment of {spec.name} is {state}", hint


def _blocking_problem(device: Device) -> _Against | None:
    """Says what rules out any vendor on the device, known to the support table or not."""
    for problem in blocking_problems(device):
        return problem.code, problem.message, problem.hint
    return None


def _spec_mismatch(device: Device, host: Host, spec: VendorSpec) -> _Against | None:
    """Judges a vendor by what its spec says: it may serve less than its engine could."""
    if device.kind not in spec.device_kinds:
        kinds = ", ".join(spec.device_kinds)
        reason = f"{spec.name} serves {kinds} devices, and {device.name} is {device.kind}"
        return "other-kind", reason, ""
    if spec.platforms and host.platform not in spec.platforms:
        platforms = ", ".join(spec.platforms)
        return "platform", f"{spec.name} is for {platforms}, and this is {host.platform}", ""
    makers = {maker_of(vendor_id) for vendor_id in spec.pci_vendors}
    if makers and device.kind != "cpu" and device.maker not in makers:
        return "other-maker", f"{spec.name} does not serve devices of {device.maker}", ""
    return None


def _order(
    device: Device, spec: VendorSpec, candidate: Candidate | None, position: int
) -> tuple[int, int, int, int]:
    """Returns the place on the ladder: tier, rank, then the card that owns more memory."""
    tier = TIERS[device.kind] + (spec.name == FALLBACK_ENGINE)
    rank = (spec.rank or 0) + (candidate.penalty if candidate else 0)
    return tier, rank, -(device.memory_bytes or 0), position


def _plans_from_offers(
    offers: Sequence[_Offer],
    precision: Precision | None,
    options: Mapping[str, Options],
    probe: VendorProbe,
) -> tuple[list[Plan], list[Rejection]]:
    plans: list[Plan] = []
    refused: list[Rejection] = []
    for offer in offers:
        own = options.get(offer.spec.name, {})
        if not offer.is_ready:
            plans.append(_installable_plan(offer, precision, own))
            continue
        answer = probe(offer.spec, offer.device, precision, own)
        if isinstance(answer, Rejection):
            refused.append(replace(answer, vendor=offer.spec.name, device=offer.device.id))
        else:
            plans.append(replace(answer, reasons=(*answer.reasons, *_reasons(offer))))
    return plans, refused


def _installable_plan(offer: _Offer, precision: Precision | None, own: Options) -> Plan:
    fallback: Precision = "fp32" if offer.device.kind == "cpu" else "fp16"
    expected = offer.candidate.precision if offer.candidate else fallback
    return Plan(
        vendor=offer.spec.name,
        device=offer.device,
        precision=precision or expected,
        options=dict(own),
        state="installable",
        reasons=(
            *_reasons(offer),
            f"{offer.spec.name} is not installed yet; this is confirmed once it is",
        ),
    )


def _reasons(offer: _Offer) -> tuple[str, ...]:
    if offer.candidate is None:
        return (f"{offer.spec.name} says it serves {offer.device.kind} devices",)
    warnings = tuple(
        problem.message for problem in offer.device.problems if problem.code != "no-gpu"
    )
    return (*offer.candidate.reasons, *offer.candidate.cautions, *warnings)


def _advice(
    devices: Sequence[Device],
    wish: _Wish,
    offers: Sequence[_Offer],
    plans: Sequence[Plan],
    rejections: Sequence[Rejection],
    *,
    may_install: bool,
) -> tuple[str, ...]:
    """Returns what would put something better than the best plan at the top."""
    advice: list[str] = []
    by_pair = {(offer.spec.name, offer.device.id): offer for offer in offers}
    best = plans[0] if plans else None
    best_offer = by_pair[(best.vendor, best.device.id)] if best else None
    best_tier = TIERS[best.device.kind] if best else max(TIERS.values()) + 1
    if best is not None and best.state == "installable" and not may_install:
        advice.append(f"sdkit-dispatch vendors install {best.vendor}")
    elif best_offer is not None and not may_install:
        better = [o for o in offers if not o.is_ready and o.order < best_offer.order]
        advice += [
            f"sdkit-dispatch vendors install {offer.spec.name}: it comes before {best.vendor} "
            f"for {offer.device.name}"
            for offer in better
            if best is not None
        ]
    kinds = {device.id: device.kind for device in devices}
    for rejection in rejections:
        kind = kinds[rejection.device]
        is_better = TIERS[kind] <= best_tier and kind != "cpu"
        is_in_reach = rejection.code not in UNCHANGEABLE and rejection.device in wish.chosen
        if is_better and is_in_reach and rejection.hint:
            advice.append(rejection.hint)
    if best_offer is not None and best_offer.candidate is not None:
        advice += best_offer.candidate.remedies
    if not plans:
        advice += [rejection.hint for rejection in rejections if rejection.hint]
    return tuple(dict.fromkeys(advice))
