"""Fake packages for the tests of environments: tiny wheels, and distributions on `sys.path`.

Not one of them is what its name says: "numpy" here is an empty module of that name.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement

from sdkit_dispatch.contract import VendorSpec
from sdkit_dispatch.env.vendors import requirements_of

VERSION = "99.0"
"""Of every fake package: newer than any version that is asked for."""

FAKE = VendorSpec(
    name="fake",
    extra="runtime",
    adapter="fake_vendor:Adapter",
    device_kinds=("cpu",),
    revision=1,
    runtime_packages=("fake-runtime",),
    conflicts=("fake-runtime-gpu",),
)
FAKE_REQUIRES = ("fake-helper", "fake-runtime>=2 ; extra == 'runtime'")


def write_wheel(
    folder: Path,
    name: str,
    version: str = VERSION,
    *,
    requires: Iterable[str] = (),
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes a wheel that holds one empty module, or `files`."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    contents = dict({f"{module}/__init__.py": b"# fake"} if files is None else files)
    contents[f"{info}/METADATA"] = _metadata(name, version, requires).encode()
    contents[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: fake\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    rows = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
    return wheel


def write_distribution(
    folder: Path,
    name: str,
    version: str = VERSION,
    *,
    requires: Iterable[str] = (),
    entry_points: str = "",
    record: str = "",
) -> Path:
    """Writes the metadata of an installed distribution; there is nothing else of it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(_metadata(name, version, requires), "utf-8")
    (info / "RECORD").write_text(record, "utf-8")
    if entry_points:
        (info / "entry_points.txt").write_text(
            f"[sdkit_dispatch.vendors]\n{entry_points}\n", "utf-8"
        )
    return info


def write_fake_vendor(folder: Path, *, requires: Iterable[str] = FAKE_REQUIRES) -> None:
    """Writes an installed third-party distribution that brings the vendor `FAKE`."""
    write_distribution(folder, "fake-vendor", requires=requires, entry_points="fake=fake_vendor:S")
    (folder / "fake_vendor.py").write_text("from env_fakes import FAKE as S\n", "utf-8")


def fitting_versions() -> dict[str, str]:
    """Returns a version that satisfies each requirement of the vendor `FAKE`."""
    versions = {}
    for one in map(Requirement, requirements_of(FAKE)):
        # One with an upper bound is satisfied by its lower one.
        lowest = [bound.version for bound in one.specifier if bound.operator == ">="]
        versions[one.name] = VERSION if one.specifier.contains(VERSION) else lowest[0]
    return versions


def write_source(folder: Path, *, without: str = "", files: int = 1) -> Path:
    """Writes wheels for all that the vendor `FAKE` needs: a folder to install from."""
    for name, version in sorted(fitting_versions().items()):
        if name not in (without, "fake-runtime"):
            write_wheel(folder, name, version)
    if without != "fake-runtime":
        many = {f"fake_runtime/part{i}.py": b"# fake" for i in range(files)}
        requires = ["numpy", "fake-only-on-windows ; sys_platform == 'win32'"]
        write_wheel(folder, "fake-runtime", requires=requires, files=many)
    write_wheel(folder, "fake-only-on-windows")
    return folder


def _metadata(name: str, version: str, requires: Iterable[str]) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += ["Provides-Extra: runtime", *(f"Requires-Dist: {line}" for line in requires)]
    return "\n".join(lines) + "\n"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
