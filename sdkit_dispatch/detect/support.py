"""Which engines support a device on this host, by the table support.yaml alone.

This is what can be said before anything is installed. Each row of the table is one support range;
a range that fits gives a `Candidate`, one that does not a `Rejection` that names the version, the
architecture or the driver at fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from sdkit_dispatch.contract import Device, DeviceKind, Precision, Problem, Rejection
from sdkit_dispatch.detect.host import Host

TABLE = Path(__file__).parent / "support.yaml"


@dataclass(frozen=True, kw_only=True)
class SupportRow:
    """One row of the table; see the head of support.yaml for the fields."""

    engine: str
    label: str
    release: str
    rank: int
    source: str
    date: str
    precision: Precision = "fp16"
    backend: str = ""
    variant: str = ""
    makers: tuple[str, ...] = ()
    kinds: tuple[DeviceKind, ...] = ()
    archs: tuple[str, ...] = ()
    forced_archs: tuple[str, ...] = ()
    unknown_arch: bool = False
    platforms: tuple[str, ...] = ()
    wsl: bool = True
    python: str = ""
    glibc: str = ""
    kernel: str = ""
    rocm: str = ""
    without_rocm: bool = False
    driver: Mapping[str, str] = field(default_factory=dict)
    driver_by_arch: Mapping[str, str] = field(default_factory=dict)
    penalty: int = 0
    caution: str = ""
    inferred: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An engine that the table says serves a device.

    Attributes:
        engine: The vendor's name: "tensorrt-rtx", "ggml".
        backend: Within ggml: "cuda", "vulkan", "metal", "rocm" or "cpu".
        variant: The build of the runtime to install: "cu12"; may be empty.
        release: The runtime version that the table's row is about.
        penalty: To be added to the rank: it works on this device, but others are better.
        reasons: Sentences, most important first.
        cautions: What to say with a plan of it.
        remedies: What would make it better, as commands or deeds.
    """

    engine: str
    label: str
    release: str
    rank: int
    precision: Precision
    penalty: int = 0
    backend: str = ""
    variant: str = ""
    reasons: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The engine with its backend: "ggml-vulkan"."""
        return f"{self.engine}-{self.backend}" if self.backend else self.engine


@dataclass(frozen=True, kw_only=True)
class InstallSize:
    """What the managed environment of a vendor takes, measured on one platform."""

    download_mb: int
    disk_mb: int
    platform: str
    date: str


@cache
def install_sizes() -> Mapping[str, InstallSize]:
    """Reads from support.yaml how big vendors are; those that nobody measured are missing."""
    import msgspec

    return msgspec.convert(_read_table()["sizes"], dict[str, InstallSize])


@cache
def _read_table() -> Mapping[str, Any]:  # Any: JSON data
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data = yaml.load(TABLE.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - both are safe
    for row in (*data["engines"], *data["sizes"].values()):
        row["date"] = str(row["date"])  # YAML has a type of its own for it
    return data  # type: ignore[no-any-return]


@cache
def support_table() -> tuple[tuple[SupportRow, ...], Mapping[str, tuple[str, ...]]]:
    """Reads support.yaml: its rows, and what each problem rules out."""
    import msgspec

    data = _read_table()
    rows = msgspec.convert(data["engines"], tuple[SupportRow, ...])
    return rows, msgspec.convert(data["problems"], dict[str, tuple[str, ...]])


def engine_labels() -> dict[str, str]:
    """Returns the engines of the table, each with its name for people."""
    rows, _ = support_table()
    return {row.engine: row.label.partition(" (")[0] for row in rows}


def engines_for(device: Device, host: Host) -> tuple[Candidate | Rejection, ...]:
    """Judges every engine and backend of the table: candidates first, the best ahead."""
    rows, ruled_out = support_table()
    groups: dict[tuple[str, str], list[SupportRow]] = {}
    for row in rows:
        groups.setdefault((row.engine, row.backend), []).append(row)
    verdicts = [_verdict(group, device, host, ruled_out) for group in groups.values()]
    candidates = [verdict for verdict in verdicts if isinstance(verdict, Candidate)]
    rejections = [verdict for verdict in verdicts if isinstance(verdict, Rejection)]
    return (*sorted(candidates, key=lambda found: found.rank + found.penalty), *rejections)


def variant_for(vendor: str, devices: Sequence[Device], host: Host) -> str:
    """Returns the build of a vendor's runtime that the best of `devices` needs; "" for any."""
    for device in devices:
        for verdict in engines_for(device, host):
            if isinstance(verdict, Candidate) and verdict.engine == vendor:
                return verdict.variant
    return ""


def version_tuple(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: "6.8.0-48" -> (6, 8, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group(0).split(".")[:6]) if found else ()


def is_in_range(version: str, wanted: str) -> bool:
    """Says whether "10.1.2" is in ">=10.1,<10.2"; an empty range holds everything."""
    have = version_tuple(version)
    for part in filter(None, (part.strip() for part in wanted.split(","))):
        operator, bound = re.match(r"(>=|<)(.*)", part).groups()  # type: ignore[union-attr]
        limit = version_tuple(bound)
        size = max(len(have), len(limit))
        left, right = (value + (0,) * (size - len(value)) for value in (have, limit))
        if not (left >= right if operator == ">=" else left < right):
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class _No:
    """Why a row does not fit."""

    code: str
    reason: str
    hint: str = ""


_Check = Callable[[SupportRow, Device, Host], _No | None]


def _verdict(
    group: list[SupportRow],
    device: Device,
    host: Host,
    ruled_out: Mapping[str, tuple[str, ...]],
) -> Candidate | Rejection:
    nearest: tuple[int, SupportRow, _No] | None = None
    better: _No | None = None
    for row in group:
        passed, no = _first_no(row, device, host, ruled_out)
        if no is None:
            return _candidate(row, device, host, better)
        if no.code == "driver-too-old":
            better = better or no
        if nearest is None or passed > nearest[0]:
            nearest = (passed, row, no)
    assert nearest is not None  # a group has a row
    _, row, no = nearest
    return Rejection(
        vendor=row.engine, code=no.code, reason=no.reason, hint=no.hint, device=device.id
    )


def _first_no(
    row: SupportRow, device: Device, host: Host, ruled_out: Mapping[str, tuple[str, ...]]
) -> tuple[int, _No | None]:
    """Returns how many checks a row passed, and the first that it did not."""
    for index, check in enumerate(_CHECKS):
        no = check(row, device, host)
        if no is not None:
            return index, no
    for problem in device.problems:
        targets = ruled_out.get(problem.code, ())
        names = {"all", row.engine, f"{row.engine}/{row.backend}"}
        if names & set(targets):
            return len(_CHECKS), _No(code=problem.code, reason=problem.message, hint=problem.hint)
    return len(_CHECKS) + 1, None


def _candidate(row: SupportRow, device: Device, host: Host, better: _No | None) -> Candidate:
    version = f"{row.label} {row.release}"
    what = device.arch or "an architecture that our table does not know"
    reasons = [f"{version} supports {what} on {host.platform}"]
    cautions = [row.caution] if row.caution else []
    if row.driver and not version_tuple(device.driver):
        cautions.append("the driver's version is unknown, so it was not checked")
    if row.rocm and not host.rocm:
        cautions.append(
            f"no ROCm is installed; {version} needs ROCm {row.rocm.partition(',')[0][2:]}"
        )
    if row.archs and not device.arch:
        cautions.append("the card is newer than our table: the runtime itself will say")
    return Candidate(
        engine=row.engine,
        backend=row.backend,
        variant=row.variant,
        label=row.label,
        release=row.release,
        rank=row.rank,
        penalty=row.penalty,
        precision=row.precision,
        reasons=tuple(reasons),
        cautions=tuple(cautions),
        remedies=(better.hint,) if better and better.hint else (),
    )


def _maker(row: SupportRow, device: Device, host: Host) -> _No | None:
    if not row.makers or device.maker in row.makers:
        return None
    return _No(
        code="other-maker",
        reason=f"{row.label} serves devices of {_listing(row.makers)}, not {device.name}",
    )


def _kind(row: SupportRow, device: Device, host: Host) -> _No | None:
    if not row.kinds or device.kind in row.kinds:
        return None
    return _No(
        code="other-kind",
        reason=f"{row.label} serves {_listing(row.kinds)} devices, and {device.name} is "
        f"{device.kind}",
    )


def _platform(row: SupportRow, device: Device, host: Host) -> _No | None:
    if not row.platforms or host.platform in row.platforms:
        return None
    hint = "use an arm64 Python" if host.is_translated else ""
    return _No(
        code="platform",
        reason=f"{row.label} {row.release} has no build for {host.platform}, only for "
        f"{_listing(row.platforms)}",
        hint=hint,
    )


def _wsl(row: SupportRow, device: Device, host: Host) -> _No | None:
    if row.wsl or not host.is_wsl:
        return None
    return _No(code="wsl", reason=f"{row.label} has no usable driver within WSL")


def _arch(row: SupportRow, device: Device, host: Host) -> _No | None:
    if not row.archs or any(fnmatchcase(device.arch, shape) for shape in row.archs):
        return None
    if any(fnmatchcase(device.arch, shape) for shape in row.forced_archs):
        return _No(
            code="needs-force",
            reason=f"{row.label} {row.release} compiles for {device.arch}, but its makers do not "
            f"list it; they list {_listing(row.archs)}",
            hint=f"--vendor {row.engine} --force",
        )
    if device.arch:
        others = _engines_listing(device)
        return _No(
            code="arch",
            reason=f"{row.label} {row.release} does not support {device.arch} ({device.name}); "
            f"it supports {_listing(row.archs)}",
            hint=f"--vendor {others[0]}" if others else "",
        )
    if row.unknown_arch:
        return None
    return _No(
        code="unknown-arch",
        reason=f"the architecture of {device.name} ({device.pci_id or device.id}) is unknown, and "
        f"{row.label} {row.release} supports {_listing(row.archs)} only",
        hint=f"install the driver of its maker, or say it: "
        f"SDKIT_DISPATCH_ARCH={device.pci_id or device.id}={row.archs[0]}",
    )


def _engines_listing(device: Device) -> list[str]:
    """Returns the engines that name the architecture of a device, the best first."""
    rows = sorted(support_table()[0], key=lambda row: row.rank + row.penalty)
    fitting = [
        row.engine
        for row in rows
        if device.maker in row.makers
        and any(fnmatchcase(device.arch, shape) for shape in row.archs)
    ]
    return list(dict.fromkeys(fitting))


def _host_range(
    code: str, what: str, version_of: Callable[[Host], str], range_of: Callable[[SupportRow], str]
) -> _Check:
    """Makes the check of a version range of the host; an unknown version passes."""

    def check(row: SupportRow, device: Device, host: Host) -> _No | None:
        version, wanted = version_of(host), range_of(row)
        if not wanted or not version or is_in_range(version, wanted):
            return None
        return _No(
            code=code,
            reason=f"{row.label} {row.release} needs {what} {wanted}, and this is {version}",
            hint=f"use {what} {wanted}",
        )

    return check


def _glibc(row: SupportRow, device: Device, host: Host) -> _No | None:
    name, _, version = host.libc.partition(" ")
    if not row.glibc or not host.libc or (name == "glibc" and is_in_range(version, row.glibc)):
        return None
    return _No(
        code="libc",
        reason=f"{row.label} {row.release} needs glibc {row.glibc}, and this system has "
        f"{host.libc}",
        hint="use a newer distribution, or a container of one",
    )


def _driver(row: SupportRow, device: Device, host: Host) -> _No | None:
    least = max(
        (row.driver.get(host.os, ""), row.driver_by_arch.get(device.arch, "")), key=version_tuple
    )
    if not version_tuple(least) or not version_tuple(device.driver):
        return None
    if is_in_range(device.driver, f">={least}"):
        return None
    return _No(
        code="driver-too-old",
        reason=f"{row.label} {row.release}{_of_variant(row)} needs driver {least} or newer for "
        f"{device.name}, and this is {device.driver}",
        hint=f"update the driver of {device.name} to {least} or newer",
    )


def _rocm(row: SupportRow, device: Device, host: Host) -> _No | None:
    if not row.rocm or (is_in_range(host.rocm, row.rocm) if host.rocm else row.without_rocm):
        return None
    have = f"ROCm {host.rocm} is installed" if host.rocm else "none is installed"
    return _No(
        code="rocm",
        reason=f"{row.label} {row.release} supports {device.arch or device.name}, but with ROCm "
        f"{row.rocm}; {have}",
        hint=f"install ROCm {row.rocm.partition(',')[0][2:]}",
    )


_CHECKS: tuple[_Check, ...] = (
    _kind,
    _maker,
    _platform,
    _wsl,
    _arch,
    _host_range("python", "Python", lambda host: host.python, lambda row: row.python),
    _glibc,
    _host_range(
        "kernel-too-old",
        "Linux kernel",
        lambda host: host.kernel if host.os == "linux" else "",
        lambda row: row.kernel,
    ),
    _driver,
    _rocm,
)
"""In this order: the further a row gets, the nearer it is, and the better its "no"."""


def blocking_problems(device: Device) -> tuple[Problem, ...]:
    """Returns the problems that rule out every engine on a device."""
    _, ruled_out = support_table()
    return tuple(p for p in device.problems if "all" in ruled_out.get(p.code, ()))


def _of_variant(row: SupportRow) -> str:
    return f" ({row.variant})" if row.variant else ""


def _listing(values: Iterable[Any]) -> str:
    # `Any`: names and patterns of several literal types; only their text counts.
    return ", ".join(str(value) for value in values)
