"""A fake vendor that can be built, and a fake cmake that writes down what it was told.

The fake cmake compiles nothing: its "libraries" are files with a word in them.
"""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import tarfile
import textwrap
from pathlib import Path
from typing import Any

from sdkit_dispatch.contract import VendorSpec

BUILDABLE = VendorSpec(
    name="fake",
    extra="",
    adapter="buildable_vendor.adapter:Adapter",
    device_kinds=("cpu",),
    revision=1,
)

RECIPE = """
variable = "FAKE_BUILT_DIR"
only_variable = "FAKE_DIR"
libraries = ["*fake*.so*"]
must_have = ["libfake-base.so"]
flags = ["BUILD_SHARED_LIBS=ON"]

[source]
package = "fake-source"
version = "1.0"
sha256 = "00"
size_mb = 1
folder = "inner"

[needs.cmake]
programs = ["cmake"]
oldest = "3.19"

[needs.fakecc]
variables = ["FAKE_CC"]
programs = ["fakecc"]

[needs."the fake headers"]
files = ["fake/fake.h"]
places = ["$FAKE_SDK/include"]

[variants.plain]
needs = ["cmake"]
flags = ["FAKE_NATIVE=ON"]
is_native = true
disk_mb = 1

[variants.gpu]
needs = ["cmake", "fakecc", "the fake headers"]
flags = ["FAKE_GPU=ON", "FAKE_COMPILER={fakecc}"]
must_have = ["libfake-gpu.so"]
disk_mb = 1

[variants.gpu.platform_flags]
linux = ["FAKE_HERE=ON"]
macos = ["FAKE_HERE=ON"]
beos = ["FAKE_THERE=ON"]

[variants.gpu.hints]
linux = "get the fake toolkit"
macos = "get the fake toolkit"
windows = "get the fake toolkit"

[variants.huge]
needs = ["cmake"]
flags = []
disk_mb = 1000000000

[variants.elsewhere]
needs = ["cmake"]
flags = []
platforms = ["beos-ppc"]
disk_mb = 1
"""

ADAPTER = """
import os

class Adapter:
    threads = None

    def probe(self, device):
        built = os.environ.get("FAKE_DIR") or os.environ.get("FAKE_BUILT_DIR") or "no build"
        return f"fake 1.0 of {os.path.basename(built)}"

    def plan(self, device, precision, options):
        from sdkit_dispatch.contract import Plan

        return Plan(vendor="fake", device=device, precision="fp32")
"""

FAKE_CMAKE = """
import json, os, pathlib, sys

words = sys.argv[1:]
if words == ["--version"]:
    print("cmake version", os.environ.get("FAKE_CMAKE_VERSION", "3.25.1"))
    sys.exit()
with open(os.environ["FAKE_CMAKE_LOG"], "a") as log:
    log.write(json.dumps(words) + "\\n")
mode = os.environ.get("FAKE_CMAKE_MODE", "")
if "-B" in words:
    objects = pathlib.Path(words[words.index("-B") + 1])
    objects.mkdir()
    flags = dict(word[2:].split("=", 1) for word in words if word.startswith("-D"))
    (objects / "flags.json").write_text(json.dumps(flags))
else:
    objects = pathlib.Path(words[1])
    flags = json.loads((objects / "flags.json").read_text())
    output = pathlib.Path(flags["CMAKE_LIBRARY_OUTPUT_DIRECTORY"])
    print("[ 50%] Building a fake object", flush=True)
    if mode == "hang":
        sys.stdin.close()
        import signal

        signal.pause()
    if mode == "fail":
        sys.exit("fake.c:1: error: it does not compile")
    names = ["libfake-base.so.1"] + ["libfake-gpu.so"] * ("FAKE_GPU" in flags)
    for name in names:
        # Some build systems overrule where the caller wants a module.
        place = objects if "gpu" in name else output
        (place / name).write_text("fake library")
    if mode != "forget":
        (output / "libfake-base.so").symlink_to("libfake-base.so.1")
    (output / "shader-generator").write_text("no library")
    print("[2/2] Linking", flush=True)
"""


def write_program(folder: Path, name: str, code: str) -> Path:
    """Writes an executable Python script; POSIX only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_buildable_vendor(site: Path) -> None:
    """Writes the package of the vendor `BUILDABLE`."""
    package = site / "buildable_vendor"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "adapter.py").write_text(ADAPTER)
    (package / "build.toml").write_text(RECIPE)


def write_archive(path: Path, files: dict[str, bytes], *, link: str = "") -> Path:
    """Writes a .tar.gz; `link` is the name of a symbolic link in it that leads outside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        if link:
            member = tarfile.TarInfo(link)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc"
            archive.addfile(member)
    return path


def fake_source(folder: Path, name: str = "fake_source-1.0") -> Path:
    """Writes the source archive of the recipe."""
    return write_archive(
        folder / f"{name}.tar.gz", {f"{name}/inner/CMakeLists.txt": b"project(fake)"}
    )


def commands_in(log: Path) -> list[list[str]]:
    """Returns what the fake cmake was called with, in order."""
    lines: list[Any] = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines]


def tool_variables(tools: Path, log: Path) -> dict[str, str]:
    """Returns the variables under which the fake tools are found."""
    path = os.pathsep.join([str(tools), os.environ.get("PATH", "")])
    return {"PATH": path, "FAKE_CMAKE_LOG": str(log)}
