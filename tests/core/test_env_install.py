"""Environments are made for real here, by uv or pip, from fake wheels and without an index."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from env_fakes import FAKE, FAKE_REQUIRES, VERSION, write_fake_vendor, write_source, write_wheel
from sdkit_dispatch.contract import Progress, Rejection, RuntimeVariant
from sdkit_dispatch.env import Environment, install, plan_install, remove, resolve, state
from sdkit_dispatch.env.room import BLOCK_BYTES
from sdkit_dispatch.env.tools import Tool, find_tool
from sdkit_dispatch.env.vendors import requirements_of
from sdkit_dispatch.errors import CancelledByUser, VendorEnvError

REPOSITORY = Path(__file__).resolve().parents[2]
LEFT_ALONE = {"current.json", "lock"}

# Runs in a process of its own, because it is killed or has to race.
INSTALLER = """
import os, signal, sys
from pathlib import Path
from env_fakes import FAKE
from sdkit_dispatch.env import install

kill_at, home, source = sys.argv[1:]

def report(progress):
    if kill_at and progress.phase.startswith(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)

print(install(FAKE, home=Path(home), source=Path(source), report=report).python)
"""


def has_tool(name: str) -> bool:
    try:
        return find_tool(name).name == name  # type: ignore[arg-type]  # uv or pip
    except VendorEnvError:
        return False


@pytest.fixture(autouse=True)
def fake_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs the fake vendor for this process and hides the pip and uv settings of the user."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "fake_vendor", raising=False)
    write_fake_vendor(site)
    return site


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "мой дом 家"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "the wheels é")


def run_in(python: Path, code: str) -> str:
    answer = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def installer(fake_site: Path, home: Path, source: Path, *, kill_at: str = "") -> list[str]:
    path = [
        str(fake_site),
        str(Path(__file__).parent),
        str(REPOSITORY),
        str(REPOSITORY / "vendors"),
    ]
    code = f"import sys; sys.path[:0] = {path!r}\n{INSTALLER}"
    return [sys.executable, "-c", code, kill_at, str(home), str(source)]


def environments(home: Path) -> list[Path]:
    base = home / "env" / "fake"
    return [path for path in base.iterdir() if path.name not in LEFT_ALONE]


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_environment_has_the_runtime_and_nothing_of_the_callers(
    tool: str, home: Path, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not has_tool(tool):
        pytest.skip(f"{tool} is not on this machine")
    # What a user may have set for other purposes.
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "no-such-file"))
    monkeypatch.setenv("UV_TARGET", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("UV_NO_BINARY", "1")
    monkeypatch.setenv("UV_PYTHON", "2.7")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "elsewhere"))
    environment = install(FAKE, home=home, source=source, tool=tool)  # type: ignore[arg-type]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    assert environment.kind == "managed"
    assert environment.packages == {"fake-runtime": VERSION}
    assert resolve(FAKE, home=home) == environment
    code = "import fake_runtime.part0 as m, sys, json; print(json.dumps([m.__file__, *sys.path]))"
    module, *search_path = json.loads(run_in(environment.python, code))
    assert environment.folder is not None
    assert Path(module).is_relative_to(environment.folder)
    packages = [entry for entry in search_path if "site-packages" in entry]
    assert packages
    assert all(Path(entry).is_relative_to(environment.folder) for entry in packages)
    assert not (tmp_path / "elsewhere").exists()
    assert environments(home) == [environment.folder]


def test_second_install_returns_what_is_there(home: Path, source: Path) -> None:
    first = install(FAKE, home=home, source=source)
    shutil.rmtree(source)
    assert install(FAKE, home=home, source=source) == first


def test_other_build_of_the_runtime_replaces_the_one_that_is_there(
    home: Path, source: Path, fake_site: Path
) -> None:
    shutil.rmtree(fake_site / "fake_vendor-99.0.dist-info")
    write_fake_vendor(
        fake_site, requires=(*FAKE_REQUIRES, "fake-runtime-old ; extra == 'runtime-old'")
    )
    old_build = RuntimeVariant(
        extra="runtime-old", runtime_packages=("fake-runtime-old",), conflicts=("fake-runtime",)
    )
    both = replace(
        FAKE, conflicts=("fake-runtime-old",), variant="new", variants={"old": old_build}
    )
    write_wheel(source, "fake-runtime-old")
    first = install(both, home=home, source=source)
    assert (first.variant, list(first.packages)) == ("new", ["fake-runtime"])
    second = install(both.of_variant("old"), home=home, source=source)
    assert (second.variant, list(second.packages)) == ("old", ["fake-runtime-old"])
    assert resolve(both, home=home) == second
    assert install(both.of_variant("old"), home=home, source=source) == second
    assert environments(home) == [second.folder]


def test_what_a_vendor_says_of_its_installation_is_the_hint_of_a_failed_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    with pytest.raises(VendorEnvError) as caught:
        install(replace(FAKE, install_note="its wheels are elsewhere"), home=home)
    assert caught.value.hint == "its wheels are elsewhere"


def test_plan_names_every_package_and_its_size_and_installs_nothing(
    home: Path, source: Path
) -> None:
    files = {"fake_runtime/weights.bin": b"\0" * (10 * BLOCK_BYTES + 1)}
    wheel = write_wheel(source, "fake-runtime", "99.1", files=files)
    plan = plan_install(FAKE, home=home, source=source)
    needed = {Requirement(line).name for line in requirements_of(FAKE)}
    assert {package.name for package in plan.packages} == needed
    (runtime,) = [package for package in plan.packages if package.name == "fake-runtime"]
    assert runtime.version == "99.1"
    assert runtime.download_bytes == wheel.stat().st_size
    metadata_files = 3
    assert runtime.disk_bytes == (11 + metadata_files) * BLOCK_BYTES
    assert plan.download_bytes == 0  # a local folder is not downloaded
    assert plan.disk_bytes > runtime.disk_bytes
    assert str(home / "env" / "fake") in plan.summary
    assert str(source) in plan.summary
    assert not home.exists()


def test_plan_is_what_gets_installed(home: Path, source: Path) -> None:
    plan = plan_install(FAKE, home=home, source=source)
    write_wheel(source, "fake-runtime", "99.9")
    environment = install(FAKE, home=home, plan=plan)
    assert environment.packages == {"fake-runtime": VERSION}


def test_missing_wheel_is_named_and_the_old_environment_keeps_working(
    home: Path, source: Path, tmp_path: Path
) -> None:
    old = install(FAKE, home=home, source=source)
    lacking = write_source(tmp_path / "lacking", without="fake-runtime")
    with pytest.raises(VendorEnvError, match="fake-runtime") as caught:
        install(FAKE, home=home, source=lacking, reinstall=True)
    assert "vendors download fake --to DIR" in caught.value.hint
    assert resolve(FAKE, home=home) == old
    assert run_in(old.python, "import fake_runtime.part0, numpy; print('works')") == "works"
    assert environments(home) == [old.folder]


def test_wheel_that_breaks_the_environment_is_not_accepted(home: Path, source: Path) -> None:
    old = install(FAKE, home=home, source=source)
    broken = {"numpy/__init__.py": b"raise ImportError('built for another machine')"}
    write_wheel(source, "numpy", "99.1", files=broken)
    with pytest.raises(VendorEnvError, match="built for another machine"):
        install(FAKE, home=home, source=source, reinstall=True)
    assert resolve(FAKE, home=home) == old


def test_wheel_that_brings_a_conflicting_one_is_not_accepted(home: Path, source: Path) -> None:
    write_wheel(source, "fake-runtime", "99.1", requires=["fake-runtime-gpu"])
    write_wheel(source, "fake-runtime-gpu")
    with pytest.raises(VendorEnvError, match="fake-runtime-gpu 99.0, which overwrites"):
        install(FAKE, home=home, source=source)
    assert environments(home) == []
    assert isinstance(resolve(FAKE, home=home), Rejection)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("phase", ["download", "check"])
def test_killed_installation_leaves_the_old_environment_and_the_next_one_recovers(
    phase: str, home: Path, source: Path, fake_site: Path
) -> None:
    killed = subprocess.run(
        installer(fake_site, home, source, kill_at=phase), capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert state(FAKE, home=home).state == "installable"
    first = install(FAKE, home=home, source=source)

    # The same once more, with an environment that has become too old.
    write_wheel(source, "fake-helper", "100.0")
    shutil.rmtree(fake_site / f"fake_vendor-{VERSION}.dist-info")
    (fake_site / "fake_vendor.py").unlink()
    write_fake_vendor(fake_site, requires=("fake-helper>=100", *FAKE_REQUIRES[1:]))
    assert state(FAKE, home=home).state == "update_required"
    killed = subprocess.run(
        installer(fake_site, home, source, kill_at=phase), capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert state(FAKE, home=home).state == "update_required"
    assert run_in(first.python, "import fake_runtime.part0, numpy; print('works')") == "works"
    second = install(FAKE, home=home, source=source)
    assert second.folder != first.folder
    assert run_in(second.python, "import fake_helper, numpy; print('works')") == "works"


def test_leftovers_of_killed_installations_are_removed_by_the_next_one(
    home: Path, source: Path
) -> None:
    for name in ("abcdef", "abcdef.tmp"):
        (home / "env" / "fake" / name / "lib").mkdir(parents=True)
        (home / "env" / "fake" / name / "lib" / "half.whl").touch()
    environment = install(FAKE, home=home, source=source)
    assert environments(home) == [environment.folder]


def test_cancelled_installation_leaves_nothing(home: Path, source: Path) -> None:
    def cancel(progress: Progress) -> None:
        if progress.phase.startswith("download"):
            raise CancelledByUser

    with pytest.raises(CancelledByUser):
        install(FAKE, home=home, source=source, report=cancel)
    assert environments(home) == []


def test_two_installations_at_once_make_one_environment(
    home: Path, source: Path, fake_site: Path
) -> None:
    results: list[Environment] = []
    may_go_on = threading.Event()

    def hold(progress: Progress) -> None:
        # The first one stops inside its lock until the second one has said that it waits.
        assert may_go_on.wait(60)

    first = threading.Thread(
        target=lambda: results.append(install(FAKE, home=home, source=source, report=hold))
    )
    phases: list[str] = []

    def note(progress: Progress) -> None:
        phases.append(progress.phase)
        may_go_on.set()

    first.start()
    while first.is_alive() and not list(home.glob("env/fake/*.tmp")):
        first.join(0.01)
    results.append(install(FAKE, home=home, source=source, report=note))
    first.join()
    assert results[0] == results[1]
    assert phases[0] == "wait for another installation of fake"
    assert environments(home) == [results[0].folder]


def test_two_processes_that_install_at_once_make_one_environment(
    home: Path, source: Path, fake_site: Path
) -> None:
    command = installer(fake_site, home, source)
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {racer.communicate()[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0]
    environment = resolve(FAKE, home=home)
    assert isinstance(environment, Environment)
    assert answers == {f"{environment.python}\n"}
    assert environments(home) == [environment.folder]


def test_removed_environment_is_gone_and_can_be_removed_again(home: Path, source: Path) -> None:
    assert remove(FAKE, home=home) is False
    environment = install(FAKE, home=home, source=source)
    assert state(FAKE, home=home).size_bytes
    assert remove(FAKE, home=home) is True
    assert environment.folder is not None
    assert not environment.folder.exists()
    assert isinstance(resolve(FAKE, home=home), Rejection)
    assert remove(FAKE, home=home) is False


def test_given_folder_of_an_environment_is_used_as_it_is(home: Path, source: Path) -> None:
    environment = install(FAKE, home=home, source=source)
    given = resolve(FAKE, choice=str(environment.folder), home=home / "another")
    assert isinstance(given, Environment)
    assert given.kind == "path"
    assert (given.python, given.fingerprint) == (environment.python, environment.fingerprint)


def test_environment_whose_python_was_uninstalled_is_broken_and_made_again(
    home: Path, source: Path
) -> None:
    environment = install(FAKE, home=home, source=source)
    environment.python.unlink()
    environment.python.symlink_to(home / "uninstalled" / "python")
    assert state(FAKE, home=home).state == "broken"
    assert install(FAKE, home=home, source=source).folder != environment.folder


def test_folder_that_is_not_there_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(VendorEnvError, match="nowhere is not a folder"):
        install(FAKE, home=home, source=tmp_path / "nowhere")


def test_home_that_cannot_be_made_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(VendorEnvError, match="cannot be made") as caught:
        install(FAKE, home=tmp_path / "file", source=source)
    assert "SDKIT_DISPATCH_HOME" in caught.value.hint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small disk"
    folder.mkdir()
    options = "size=16M,nr_inodes=60"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if sys.platform != "linux" or shutil.which("mount") is None:
        pytest.skip("a small tmpfs is made with mount, on Linux")
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_that_is_too_small_is_refused_with_the_sizes_before_anything_is_written(
    small_disk: Path, source: Path
) -> None:
    files = {"fake_runtime/big.bin": bytes(40_000_000)}
    write_wheel(source, "fake-runtime", "99.1", files=files)
    with pytest.raises(VendorEnvError) as caught:
        install(FAKE, home=small_disk / "home", source=source)
    message = caught.value.message
    assert message.startswith("not enough room for fake: about 44 MB are needed in ")
    assert str(small_disk) in message
    assert message.endswith(" 17 MB are free")
    assert environments(small_disk / "home") == []


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_disk_that_fills_up_half_way_is_an_error_with_the_sizes(
    tool: str, small_disk: Path, tmp_path: Path
) -> None:
    if not has_tool(tool):
        pytest.skip(f"{tool} is not on this machine")
    # More files than the disk has inodes: there are bytes enough when the installation begins.
    source = write_source(tmp_path / "many files", files=100)
    with pytest.raises(VendorEnvError) as caught:
        install(FAKE, home=small_disk / "home", source=source, tool=tool)  # type: ignore[arg-type]
    assert "not enough room for fake: about " in caught.value.message
    assert " are free (" in caught.value.message
    assert environments(small_disk / "home") == []
    assert isinstance(resolve(FAKE, home=small_disk / "home"), Rejection)


def test_machine_without_an_installer_is_told_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, home: Path, source: Path
) -> None:
    def none(*_: object) -> Tool | None:
        return None

    monkeypatch.setattr("sdkit_dispatch.env.tools._find_uv", none)
    monkeypatch.setattr("sdkit_dispatch.env.tools._find_pip", none)
    with pytest.raises(VendorEnvError, match="neither uv nor pip") as caught:
        install(FAKE, home=home, source=source)
    assert "ensurepip" in caught.value.hint


def test_vendor_that_needs_nothing_new_can_be_installed_too(home: Path, source: Path) -> None:
    plain = replace(FAKE, extra="", runtime_packages=())
    assert install(plain, home=home, source=source).kind == "managed"
