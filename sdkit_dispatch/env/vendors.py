"""The vendors that are installed beside us, and what each of them needs to be installed."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from pathlib import Path
from typing import Any

from sdkit_dispatch.contract import (
    Rejection,
    VendorSpec,
    record_from_json,
    record_to_json,
)

GROUP = "sdkit_dispatch.vendors"
OWN_NAME = "sdkit-dispatch"

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")  # it becomes the name of a folder
_CHECKOUT = Path(__file__).resolve().parents[2]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A distribution that brings vendors.

    Attributes:
        requires: Lines as in the `Requires-Dist` of its metadata.
    """

    name: str
    requires: tuple[str, ...] = ()
    entry_points: tuple[EntryPoint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VendorScan:
    """Every vendor found, best rank first, and why others could not be read."""

    specs: Mapping[str, VendorSpec]
    broken: tuple[Rejection, ...] = ()


def find_vendors() -> dict[str, VendorSpec]:
    """Returns name -> spec of every vendor, best rank first; broken ones are logged."""
    scan = scan_vendors()
    for rejection in scan.broken:
        log.warning("%s (%s)", rejection.reason, rejection.hint)
    return dict(scan.specs)


def scan_vendors() -> VendorScan:
    """Reads the entry points of every distribution; a broken one never hides the others."""
    specs: dict[str, VendorSpec] = {}
    owners: dict[str, str] = {}
    broken: list[Rejection] = []
    for owner in find_owners():
        for entry in owner.entry_points:
            try:
                spec = entry.load()
                problem = _problem(entry.name, spec)
            except (Exception, SystemExit) as error:  # anything: it is somebody else's code
                problem = f"{type(error).__name__}: {error}"
            if not problem and entry.name in specs:
                problem = f"{owners[entry.name]} brings a vendor of that name, too"
            if problem:
                broken.append(
                    Rejection(
                        vendor=entry.name,
                        code="broken-vendor",
                        reason=f"the vendor {entry.name!r} of {owner.name} is broken: {problem}",
                        hint=f"update or uninstall {owner.name}",
                    )
                )
            else:
                specs[entry.name], owners[entry.name] = spec, owner.name
    last = 1 << 30
    ranked = sorted(
        specs.values(), key=lambda spec: (last if spec.rank is None else spec.rank, spec.name)
    )
    return VendorScan(specs={spec.name: spec for spec in ranked}, broken=tuple(broken))


def find_owners() -> list[Owner]:
    """Returns the distributions that bring vendors, ours first."""
    others: dict[str, tuple[Distribution, list[EntryPoint]]] = {}
    for entry in entry_points(group=GROUP):
        if entry.dist is not None and (name := normal_name(entry.dist.name)) != OWN_NAME:
            others.setdefault(name, (entry.dist, []))[1].append(entry)
    return [
        _own_from_checkout() or _own_from_metadata(),
        *(_owner_from_distribution(*others[name]) for name in sorted(others)),
    ]


def requirements_of(
    spec: VendorSpec, *, runtime_only: bool = False, marker_values: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Returns what a vendor's environment must hold, as requirement lines without markers.

    Our own dependencies, those of the distribution that brings the vendor, and those of the
    vendor's extra; neither of the two distributions themselves: their code is lent to the worker.

    Args:
        spec: The vendor.
        runtime_only: Only those of the vendor's extra.
        marker_values: Of the machine it is for ("sys_platform", ...); of this one by default.
    """
    own, *others = find_owners()
    owner = next((one for one in others if _brings(one, spec) and not _brings(own, spec)), own)
    lines: list[str] = []
    if not runtime_only:
        lines += _requirements(own, "", marker_values)
        if owner.name != own.name:
            lines += _requirements(owner, "", marker_values)
    if spec.extra:
        base = set(_requirements(owner, "", marker_values))
        lines += [
            line for line in _requirements(owner, spec.extra, marker_values) if line not in base
        ]
    return tuple(dict.fromkeys(lines))


def normal_name(name: str) -> str:
    """Returns a distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _brings(owner: Owner, spec: VendorSpec) -> bool:
    return any(entry.name == spec.name for entry in owner.entry_points)


def _requirements(owner: Owner, extra: str, marker_values: Mapping[str, str] | None) -> list[str]:
    from packaging.requirements import InvalidRequirement, Requirement

    lines: list[str] = []
    for text in owner.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            log.warning("%s: the requirement %r cannot be read", owner.name, text)
            continue
        values = {**(marker_values or {}), "extra": extra}
        if requirement.marker and not requirement.marker.evaluate(values):
            continue
        if normal_name(requirement.name) == normal_name(owner.name):  # an extra of extras
            for other in sorted(requirement.extras - {extra}):
                lines += _requirements(owner, other, marker_values)
        elif normal_name(requirement.name) != OWN_NAME:
            requirement.marker = None
            lines.append(str(requirement))
    return lines


def _problem(name: str, spec: object) -> str:
    if not _NAME.fullmatch(name):
        return f"its name is not like {_NAME.pattern}"
    if not isinstance(spec, VendorSpec):
        return f"its entry point is a {type(spec).__name__}, not a VendorSpec"
    try:
        record_from_json(VendorSpec, record_to_json(spec))
    except (TypeError, ValueError) as error:
        return f"its spec is wrong: {error}"
    if spec.name != name:
        return f"its spec is named {spec.name!r}"
    return ""


def _own_from_metadata() -> Owner:
    for distribution in distributions(name=OWN_NAME):
        entries = distribution.entry_points.select(group=GROUP)
        return _owner_from_distribution(distribution, list(entries))
    return Owner(name=OWN_NAME)


def _owner_from_distribution(distribution: Distribution, entries: Sequence[EntryPoint]) -> Owner:
    return Owner(
        name=normal_name(distribution.name),
        requires=tuple(distribution.requires or ()),
        entry_points=tuple(entries),
    )


def _own_from_checkout() -> Owner | None:
    # In a checkout pyproject.toml is the truth: the metadata of an editable installation does not
    # know the vendors that were added since, and there is none if the checkout is on PYTHONPATH.
    file = _CHECKOUT / "pyproject.toml"
    if not file.is_file():
        return None
    import tomllib

    project: dict[str, Any] = tomllib.loads(file.read_text("utf-8")).get("project", {})
    # Any: the values of a TOML table.
    if project.get("name") != OWN_NAME:
        return None
    extras = project.get("optional-dependencies", {})
    return Owner(
        name=OWN_NAME,
        requires=(
            *project.get("dependencies", ()),
            *(_with_extra(line, extra) for extra, lines in extras.items() for line in lines),
        ),
        entry_points=tuple(
            EntryPoint(name=name, value=value, group=GROUP)
            for name, value in project.get("entry-points", {}).get(GROUP, {}).items()
        ),
    )


def _with_extra(line: str, extra: str) -> str:
    requirement, _, marker = line.partition(";")
    condition = f"({marker.strip()}) and " if marker.strip() else ""
    return f"{requirement.strip()} ; {condition}extra == '{extra}'"
