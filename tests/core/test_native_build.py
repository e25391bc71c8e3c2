"""A fake vendor's runtime is "built" with a fake cmake: nothing is compiled here."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from native_fakes import (
    BUILDABLE,
    FAKE_CMAKE,
    commands_in,
    fake_source,
    tool_variables,
    write_archive,
    write_buildable_vendor,
    write_program,
)
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import Device, Plan, Progress, record_to_json
from sdkit_dispatch.env.download import download_source
from sdkit_dispatch.errors import CancelledByUser, ConfigError, VendorEnvError
from sdkit_dispatch.native.building import build, fraction_in
from sdkit_dispatch.native.builds import (
    Build,
    builds_folder,
    builds_of,
    built_variables,
    remove_builds,
    right_build,
)
from sdkit_dispatch.native.preflight import too_old
from sdkit_dispatch.native.recipe import recipe_of
from sdkit_dispatch.whole_file import write_whole
from sdkit_dispatch.workers import Workers
from sdkit_null import SPEC as NULL

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the fake cmake is a POSIX script")

CPU = Device(id="cpu", kind="cpu", maker="x", name="the processor")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake vendor is installed, and the fake cmake is the first on PATH."""
    folder = tmp_path / "fake tools"
    write_program(folder, "cmake", FAKE_CMAKE)
    write_buildable_vendor(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name, value in tool_variables(folder, tmp_path / "log").items():
        monkeypatch.setenv(name, value)
    for name in ("FAKE_CC", "FAKE_SDK", "FAKE_CMAKE_MODE", "FAKE_BUILT_DIR", "FAKE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def make(tools: Path, tmp_path: Path) -> Callable[..., Build]:
    source = fake_source(tmp_path / "sources")

    def run(variant: str = "plain", **changes: Any) -> Build:
        given = {"home": tmp_path / "home", "accept": lambda *_: "fake 1.0", "source": source}
        return build(BUILDABLE, variant, **{**given, **changes})

    return run


def is_clean(home: Path) -> bool:
    """Nothing half is left: neither a folder to build in nor a build without its manifest."""
    return not list((home / "tmp").glob("*")) and len(builds_of("fake", home)) == len(
        [path for path in builds_folder("fake", home).glob("*")]
    )


def test_everything_that_is_missing_is_named_before_anything_is_fetched(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CMAKE_VERSION", "3.5.0")
    with pytest.raises(VendorEnvError) as caught:
        build(BUILDABLE, "gpu", home=tmp_path / "home", accept=lambda *_: "")
    message = caught.value.message
    assert "cmake 3.19 is needed, this is cmake version 3.5.0" in message
    assert "fakecc is not found" in message
    assert "the fake headers is not found" in message
    assert caught.value.hint == "get the fake toolkit"
    assert not (tmp_path / "home").exists()


def test_a_full_disk_is_said_before_anything_is_fetched(tools: Path, tmp_path: Path) -> None:
    with pytest.raises(VendorEnvError, match=r"about 1000000\.0 GB are needed.* are free"):
        build(BUILDABLE, "huge", home=tmp_path / "home", accept=lambda *_: "")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("variant", "error", "words"),
    [("elsewhere", VendorEnvError, "beos-ppc"), ("steam", ConfigError, "plain, gpu, huge")],
)
def test_a_variant_that_is_not_for_here_is_refused(
    tools: Path, tmp_path: Path, variant: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build(BUILDABLE, variant, home=tmp_path / "home", accept=lambda *_: "")


def test_a_vendor_without_a_recipe_says_so() -> None:
    with pytest.raises(ConfigError, match="'null' cannot be built from source"):
        recipe_of(NULL)


@pytest.mark.parametrize(
    ("words", "oldest", "expected"),
    [
        ("cmake version 3.25.1", "3.19", False),
        ("cmake version 3.5.0", "3.19", True),
        ("Cuda compilation tools, release 12.4, V12.4.131", "11.7", False),
        ("no version at all", "3.19", False),
        ("cmake version 3.5.0", "", False),
    ],
)
def test_versions_are_compared_as_numbers(words: str, oldest: str, expected: bool) -> None:
    assert too_old(words, oldest) is expected


def test_a_build_has_its_libraries_and_says_what_it_is_of(
    make: Callable[..., Build], tmp_path: Path
) -> None:
    made = make()
    folder = builds_folder("fake", tmp_path / "home") / made.fingerprint
    assert sorted(path.name for path in folder.iterdir()) == [
        "libfake-base.so",
        "libfake-base.so.1",
        "manifest.json",
    ]
    assert (folder / "libfake-base.so").read_text() == "fake library"
    source = (tmp_path / "sources" / "fake_source-1.0.tar.gz").read_bytes()
    assert made.source_sha256 == hashlib.sha256(source).hexdigest()
    assert made.source == "fake_source-1.0"
    assert made.tools == {"cmake": "cmake version 3.25.1"}
    assert made.runtime == "fake 1.0"
    assert made.processor
    assert builds_of("fake", tmp_path / "home") == (made,)
    assert is_clean(tmp_path / "home")


def test_cmake_gets_the_flags_the_tools_and_the_jobs(
    make: Callable[..., Build], tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = write_program(tools, "fakecc", "print('fakecc 7.1')")
    header = tmp_path / "sdk" / "include" / "fake" / "fake.h"
    write_whole(header, b"")
    monkeypatch.setenv("FAKE_SDK", str(tmp_path / "sdk"))
    made = make("gpu", jobs=3)
    configure, compile_ = commands_in(tmp_path / "log")
    assert {"-DBUILD_SHARED_LIBS=ON", "-DFAKE_GPU=ON", "-DFAKE_HERE=ON"} <= set(configure)
    assert "-DFAKE_THERE=ON" not in configure
    assert f"-DFAKE_COMPILER={compiler}" in configure
    assert compile_[-2:] == ["--parallel", "3"]
    assert made.tools["fakecc"] == "fakecc 7.1"
    assert "libfake-gpu.so" in made.files
    assert made.processor == ""


def test_a_compiler_named_by_a_variable_comes_first(
    make: Callable[..., Build], tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tools, "fakecc", "print('fakecc 7.1')")
    other = write_program(tmp_path / "other", "cc-8", "print('fakecc 8.0')")
    write_whole(tmp_path / "sdk" / "include" / "fake" / "fake.h", b"")
    monkeypatch.setenv("FAKE_SDK", str(tmp_path / "sdk"))
    first = make("gpu")
    monkeypatch.setenv("FAKE_CC", str(other))
    second = make("gpu")
    assert second.tools["fakecc"] == "fakecc 8.0"
    assert second.fingerprint != first.fingerprint


def test_the_same_is_not_built_twice(make: Callable[..., Build], tmp_path: Path) -> None:
    first = make()
    assert make() == first
    assert len(commands_in(tmp_path / "log")) == 2


def test_a_build_that_lost_a_file_is_made_again(make: Callable[..., Build], tmp_path: Path) -> None:
    made = make()
    folder = builds_folder("fake", tmp_path / "home") / made.fingerprint
    (folder / "libfake-base.so.1").unlink()
    assert right_build("fake", tmp_path / "home") is None
    make()
    assert (folder / "libfake-base.so.1").is_file()


def test_progress_is_the_compilers_own(make: Callable[..., Build]) -> None:
    told: list[Progress] = []
    make(report=told.append)
    phases = list(dict.fromkeys(one.phase for one in told))
    assert phases == ["fetch the source of fake", "configure fake", "compile fake", "try fake"]
    assert Progress(phase="compile fake", fraction=0.5) in told


@pytest.mark.parametrize(
    ("line", "fraction"),
    [("[ 37%] Building CXX", 0.37), ("[12/48] Building", 0.25), ("-- a line [x]", 0.2)],
)
def test_lines_of_make_and_ninja_say_how_far_they_are(line: str, fraction: float) -> None:
    assert fraction_in(line, 0.2) == fraction


def test_a_compiler_that_fails_is_quoted_and_nothing_is_left(
    make: Callable[..., Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CMAKE_MODE", "fail")
    with pytest.raises(VendorEnvError, match=r"(?s)fake could not be built.*does not compile"):
        make()
    assert is_clean(tmp_path / "home")


def test_a_build_without_what_it_must_have_is_refused(
    make: Callable[..., Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CMAKE_MODE", "forget")
    with pytest.raises(VendorEnvError, match=r"gave no libfake-base\.so"):
        make()
    assert is_clean(tmp_path / "home")


def test_a_build_that_the_vendor_refuses_does_not_take_its_place(
    make: Callable[..., Build], tmp_path: Path
) -> None:
    def refuse(*_: object) -> str:
        raise VendorEnvError("it does not serve")

    with pytest.raises(VendorEnvError, match="it does not serve"):
        make(accept=refuse)
    assert is_clean(tmp_path / "home")


def test_a_cancelled_build_leaves_nothing_and_ends_the_compiler(
    make: Callable[..., Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CMAKE_MODE", "hang")

    def cancel(progress: Progress) -> None:
        if progress.fraction == 0.5:
            raise CancelledByUser

    with pytest.raises(CancelledByUser):
        make(report=cancel)
    assert is_clean(tmp_path / "home")
    monkeypatch.delenv("FAKE_CMAKE_MODE")
    assert make().runtime == "fake 1.0"


def test_a_killed_build_is_no_build_and_the_next_one_sweeps_it(
    make: Callable[..., Build], tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from native_fakes import BUILDABLE; "
        "from sdkit_dispatch.native.building import build; "
        "build(BUILDABLE, 'plain', home=Path(sys.argv[1]), source=Path(sys.argv[2]), "
        "accept=lambda *_: '', report=lambda one: print(one.fraction, flush=True))"
    )
    home, source = tmp_path / "home", tmp_path / "sources" / "fake_source-1.0.tar.gz"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(home), str(source)],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "FAKE_CMAKE_MODE": "hang",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    assert process.stdout is not None
    with process.stdout:
        assert any("0.5" in line for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    process.wait()
    assert builds_of("fake", home) == ()
    (leftover,) = (home / "tmp").iterdir()
    _end_orphans(leftover)
    assert make().runtime == "fake 1.0"
    assert is_clean(home)


def _end_orphans(folder: Path) -> None:
    """Ends the fake cmake that the killed process left behind, told by its command line."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            os.kill(int(entry.parent.name), signal.SIGKILL)


def test_the_newest_build_for_this_machine_is_the_right_one(
    make: Callable[..., Build], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    made = make()
    folder = builds_folder("fake", home)
    others = {
        "aaaa": replace(made, created_at="2001-01-01", variant="older"),
        "bbbb": replace(made, created_at="9001-01-01", processor="another one"),
        "cccc": replace(made, created_at="9002-01-01", platform="beos-ppc"),
        "dddd": replace(made, created_at="9003-01-01", files={"gone.so": ""}),
    }
    for name, other in others.items():
        write_manifest(folder / name, replace(other, fingerprint=name))
    (folder / "eeee").mkdir()
    (folder / "eeee" / "manifest.json").write_text("{")
    assert right_build("fake", home) == made
    assert built_variables("fake", home) == {"FAKE_BUILT_DIR": str(folder / made.fingerprint)}
    assert remove_builds("fake", home) == 6
    assert built_variables("fake", home) == {}


def write_manifest(folder: Path, made: Build) -> None:
    import json

    folder.mkdir(parents=True)
    for name in ("libfake-base.so.1",):
        (folder / name).write_text("fake library")
    (folder / "manifest.json").write_text(json.dumps(record_to_json(made)))


def test_a_worker_is_told_of_the_build_and_an_answer_of_before_is_not_remembered(
    make: Callable[..., Build], tmp_path: Path
) -> None:
    home = tmp_path / "home"

    def runtime() -> str:
        with Workers(home=home, config=Config(), specs={"fake": BUILDABLE}) as workers:
            plan = workers.probe(BUILDABLE, CPU, None, {})
        assert isinstance(plan, Plan)
        return plan.runtime

    assert runtime() == "fake 1.0 of no build"
    made = make()
    assert runtime() == f"fake 1.0 of {made.fingerprint}"
    remove_builds("fake", home)
    assert runtime() == "fake 1.0 of no build"


def test_what_the_user_sets_comes_before_the_build_and_is_not_remembered(
    make: Callable[..., Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    with Workers(home=tmp_path / "home", config=Config(), specs={"fake": BUILDABLE}) as workers:
        monkeypatch.setenv("FAKE_BUILT_DIR", "/of/the/user")
        plan = workers.probe(BUILDABLE, CPU, None, {})
    assert isinstance(plan, Plan)
    assert plan.runtime == "fake 1.0 of user"


@pytest.mark.parametrize("name", ["../outside", "/absolute"])
def test_an_archive_that_leads_outside_is_refused(
    make: Callable[..., Build], tmp_path: Path, name: str
) -> None:
    evil = write_archive(tmp_path / "evil.tar.gz", {name: b"x", "a/inner/CMakeLists.txt": b""})
    with pytest.raises(VendorEnvError, match="cannot be unpacked"):
        make(source=evil)
    linked = write_archive(
        tmp_path / "linked.tar.gz", {"a/inner/CMakeLists.txt": b""}, link="a/link"
    )
    with pytest.raises(VendorEnvError, match="no plain file"):
        make(source=linked)
    assert is_clean(tmp_path / "home")


def test_what_is_no_source_of_the_vendor_is_refused(
    make: Callable[..., Build], tmp_path: Path
) -> None:
    other = write_archive(tmp_path / "other.tar.gz", {"other/README": b""})
    with pytest.raises(VendorEnvError, match=r"no inner/CMakeLists\.txt"):
        make(source=other)
    with pytest.raises(ConfigError, match=r"ends in \.tar\.gz"):
        make(source=tmp_path)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip knows one folder, with a source archive whose build backend is inside it."""
    name = "fake_source-1.0"
    project = b'[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
    backend = b"""
import pathlib
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "fake_source-1.0.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: fake-source\\nVersion: 1.0")
    return info.name
"""
    metadata = b"Metadata-Version: 2.1\nName: fake-source\nVersion: 1.0\n"
    archive = write_archive(
        tmp_path / "mirror" / f"{name}.tar.gz",
        {
            f"{name}/pyproject.toml": project,
            f"{name}/own.py": backend,
            f"{name}/PKG-INFO": metadata,
        },
    )
    for variable in [one for one in os.environ if one.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    return archive


def test_a_source_archive_is_fetched_and_its_digest_is_compared(
    mirror: Path, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    to.mkdir()
    digest = hashlib.sha256(mirror.read_bytes()).hexdigest()
    found = download_source("fake-source", "1.0", sha256=digest, to=to)
    assert found.read_bytes() == mirror.read_bytes()
    found.unlink()
    with pytest.raises(VendorEnvError, match=r"(?i)hash"):
        download_source("fake-source", "1.0", sha256="0" * 64, to=to)
    assert not list(to.glob("*.tar.gz"))


def test_the_command_line_names_the_variants(tools: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sdkit_dispatch", "vendors", "build", "ggml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--with may be cpu, vulkan, cuda, hip, sycl, metal" in done.stderr


def test_the_command_line_removes_builds_and_lists_them(
    make: Callable[..., Build], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    made = replace(make(), vendor="null", fingerprint="0123456789abcdef")
    write_manifest(builds_folder("null", home) / made.fingerprint, made)
    command = [sys.executable, "-m", "sdkit_dispatch", "--home", str(home), "vendors"]
    listed = subprocess.run([*command, "list"], capture_output=True, text=True, check=True)
    assert "built here: fake_source-1.0 with plain (build 01234567)" in listed.stdout
    removed = subprocess.run(
        [*command, "build", "null", "--remove"], capture_output=True, text=True, check=True
    )
    assert removed.stdout == "null: 1 build removed\n"
