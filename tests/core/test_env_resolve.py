from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_fakes import FAKE, fitting_versions, write_distribution, write_fake_vendor
from sdkit_dispatch.contract import Rejection, RuntimeVariant, VendorSpec
from sdkit_dispatch.env import Environment, platform_name, resolve, state

INSTALL = "sdkit-dispatch vendors install fake"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on `sys.path` in which the fake vendor, but not its runtime, is installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "fake_vendor", raising=False)
    write_fake_vendor(folder, requires=("fake-runtime>=2; extra == 'runtime'",))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def write_managed(home: Path, *, packages: dict[str, str] | None = None) -> Path:
    """Writes what a managed environment of the fake vendor looks like from outside."""
    base = home / "env" / "fake"
    for name, version in {**fitting_versions(), "fake-runtime": "3.0", **(packages or {})}.items():
        write_distribution(base / "abc" / "site", name, version)
    (base / "abc" / "python").touch()
    pointer = {"folder": "abc", "python": "python", "search_path": ["site"], "size_bytes": 5}
    (base / "current.json").write_text(json.dumps(pointer), "utf-8")
    return base / "abc"


def served(spec: VendorSpec, home: Path, choice: str = "auto") -> Environment:
    environment = resolve(spec, choice=choice, home=home)
    assert isinstance(environment, Environment), environment
    return environment


def refused(spec: VendorSpec, home: Path, choice: str = "auto") -> Rejection:
    rejection = resolve(spec, choice=choice, home=home)
    assert isinstance(rejection, Rejection), rejection
    assert rejection.vendor == spec.name
    return rejection


def test_runtime_that_is_nowhere_is_rejected_with_the_command_that_installs_it(
    site: Path, home: Path
) -> None:
    for choice in ("auto", "managed", "current"):
        rejection = refused(FAKE, home, choice)
        assert (rejection.code, rejection.hint) == ("not-installed", INSTALL)
    assert "fake-runtime is not installed in" in refused(FAKE, home).reason
    assert not home.exists()


def test_current_interpreter_serves_where_the_runtime_is_installed(site: Path, home: Path) -> None:
    write_distribution(site, "fake_Runtime", "2.5")
    (site / "fake_runtime").mkdir()
    (site / "fake_runtime" / "__init__.py").write_text("raise SystemExit('imported!')", "utf-8")
    environment = served(FAKE, home)
    assert (environment.kind, environment.is_isolated) == ("current", False)
    assert environment.python == Path(sys.executable)
    assert environment.packages == {"fake-runtime": "2.5"}


def test_vendor_without_a_runtime_is_served_by_the_current_interpreter(home: Path) -> None:
    plain = replace(FAKE, runtime_packages=(), extra="")
    for choice in ("auto", "managed", "current"):
        assert served(plain, home, choice).python == Path(sys.executable)


def test_current_interpreter_with_a_conflicting_wheel_is_rejected(site: Path, home: Path) -> None:
    write_distribution(site, "fake-runtime", "2.5")
    write_distribution(site, "fake_runtime_gpu", "2.4")
    rejection = refused(FAKE, home, "current")
    assert rejection.code == "conflict"
    assert "fake-runtime-gpu 2.4, which overwrites files of fake-runtime" in rejection.reason
    assert (refused(FAKE, home).code, refused(FAKE, home).hint) == ("not-installed", INSTALL)


def test_runtime_that_is_too_old_is_rejected(site: Path, home: Path) -> None:
    write_distribution(site, "fake-runtime", "1.9")
    rejection = refused(FAKE, home, "current")
    assert rejection.code == "outdated"
    assert "fake-runtime 1.9 is not >=2" in rejection.reason
    assert "fake-runtime 1.9 is not >=2" in refused(FAKE, home).reason


def test_leftover_of_an_uninstalled_runtime_does_not_count(site: Path, home: Path) -> None:
    (site / "fake_runtime-2.5.dist-info").mkdir()
    assert refused(FAKE, home, "current").code == "not-installed"


def test_managed_environment_comes_before_the_current_interpreter(site: Path, home: Path) -> None:
    write_distribution(site, "fake-runtime", "2.5")
    folder = write_managed(home)
    environment = served(FAKE, home)
    assert (environment.kind, environment.is_isolated) == ("managed", True)
    assert environment.python == folder / "python"
    assert environment.packages == {"fake-runtime": "3.0"}
    assert served(FAKE, home, "current").packages == {"fake-runtime": "2.5"}


def test_current_interpreter_steps_in_for_a_managed_environment_that_is_broken(
    site: Path, home: Path
) -> None:
    (write_managed(home) / "python").unlink()
    rejection = refused(FAKE, home)
    assert (rejection.code, rejection.hint) == ("broken", INSTALL)
    assert "no working Python" in rejection.reason
    write_distribution(site, "fake-runtime", "2.5")
    assert served(FAKE, home).kind == "current"
    assert refused(FAKE, home, "managed").code == "broken"


@pytest.mark.parametrize(
    ("packages", "code", "expected"),
    [
        ({"fake-runtime": "1.0"}, "outdated", "fake-runtime 1.0 is not >=2"),
        ({"numpy": "1.0"}, "outdated", "numpy 1.0 is not >="),
        ({"fake-runtime-gpu": "3.0"}, "conflict", "overwrites"),
    ],
)
def test_managed_environment_that_does_not_fit_is_rejected(
    site: Path, home: Path, packages: dict[str, str], code: str, expected: str
) -> None:
    write_managed(home, packages=packages)
    rejection = refused(FAKE, home)
    assert (rejection.code, rejection.hint) == (code, INSTALL)
    assert expected in rejection.reason


@given(data=st.one_of(st.binary(max_size=40), st.sampled_from([b"{}", b"[]", b"null", b'{"a":1}'])))
def test_any_bytes_in_the_pointer_are_a_broken_environment(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.getbasetemp() / "any-pointer"
    (home / "env" / "fake").mkdir(parents=True, exist_ok=True)
    (home / "env" / "fake" / "current.json").write_bytes(data)
    assert refused(FAKE, home, "managed").code == "broken"


def test_fingerprint_changes_with_the_runtime_and_what_it_needs_and_with_nothing_else(
    site: Path, home: Path
) -> None:
    needs = ["fake-core", "fake-absent; sys_platform == 'beos'", "fake-extra; extra == 'more'"]
    write_distribution(site, "fake-runtime", "2.5", requires=needs)
    core = write_distribution(site, "fake-core", "1.0", record="fake_core.py,sha256=a,1")
    write_distribution(site, "fake-extra", "1.0")
    first = served(FAKE, home).fingerprint
    assert served(FAKE, home).fingerprint == first
    write_distribution(site, "fake-unrelated", "1.0")
    (site / "fake_extra-1.0.dist-info" / "RECORD").write_text("changed", "utf-8")
    assert served(FAKE, home).fingerprint == first
    (core / "RECORD").write_text("fake_core.py,sha256=b,1", "utf-8")
    assert served(FAKE, home).fingerprint != first


def test_given_python_is_asked_for_what_it_has(site: Path, home: Path, tmp_path: Path) -> None:
    installed_here = replace(FAKE, name="other", runtime_packages=("packaging",), extra="")
    environment = served(installed_here, home, sys.executable)
    assert (environment.kind, environment.is_isolated) == ("path", True)
    assert environment.python == Path(sys.executable)
    # The folder on `sys.path` of this process is not on that of the other one.
    write_distribution(site, "fake-runtime", "2.5")
    assert refused(FAKE, home, sys.executable).reason.startswith("fake-runtime is not installed")
    assert refused(FAKE, home, str(tmp_path)).code == "no-python"
    assert refused(FAKE, home, str(tmp_path / "none" / "python")).code == "no-python"


def test_state_tells_what_to_run_next(site: Path, home: Path) -> None:
    before = state(FAKE, home=home)
    assert (before.state, before.action, before.location) == ("installable", INSTALL, "")
    folder = write_managed(home)
    good = state(FAKE, home=home)
    assert (good.state, good.action, good.size_bytes) == ("installed", "", 5)
    assert (good.version, good.location) == ("fake-runtime 3.0", str(folder))
    info = folder / "site" / "fake_runtime-3.0.dist-info"
    info.rename(info.with_name("fake_runtime-1.0.dist-info"))
    metadata = folder / "site" / "fake_runtime-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text("utf-8").replace("3.0", "1.0"), "utf-8")
    old = state(FAKE, home=home)
    assert (old.state, old.action) == ("update_required", INSTALL)
    (folder / "python").unlink()
    assert (state(FAKE, home=home).state, state(FAKE, home=home).action) == ("broken", INSTALL)


def test_state_on_a_platform_that_the_vendor_does_not_know_is_unsupported(
    site: Path, home: Path
) -> None:
    assert state(replace(FAKE, platforms=(platform_name(),)), home=home).state == "installable"
    elsewhere = state(replace(FAKE, platforms=("beos-ppc",)), home=home)
    assert (elsewhere.state, elsewhere.action) == ("unsupported", "")
    assert "beos-ppc" in elsewhere.message


def test_state_of_a_vendor_in_the_current_environment_is_installed(site: Path, home: Path) -> None:
    write_distribution(site, "fake-runtime", "2.5")
    here = state(FAKE, home=home)
    assert (here.state, here.location) == ("installed", sys.prefix)
    assert here.size_bytes is None


TWO_BUILDS = replace(
    FAKE,
    variant="new",
    variants={
        "old": RuntimeVariant(
            extra="runtime-old",
            runtime_packages=("fake-runtime-old",),
            conflicts=("fake-runtime",),
        )
    },
    conflicts=("fake-runtime-old",),
)
"""The fake vendor, with a second build of its runtime for older drivers."""


def test_current_interpreter_serves_with_whichever_build_it_has(site: Path, home: Path) -> None:
    assert refused(TWO_BUILDS, home).code == "not-installed"
    old = write_distribution(site, "fake-runtime-old", "2.5")
    environment = served(TWO_BUILDS, home)
    assert (environment.variant, environment.packages) == ("old", {"fake-runtime-old": "2.5"})
    write_distribution(site, "fake-runtime", "2.5")
    assert refused(TWO_BUILDS, home, "current").code == "conflict"
    shutil.rmtree(old)
    assert served(TWO_BUILDS, home).variant == "new"


def test_managed_environment_remembers_which_build_it_holds(site: Path, home: Path) -> None:
    folder = write_managed(home)
    assert served(TWO_BUILDS, home).variant == "new"  # made before there was a choice
    pointer = folder.parent / "current.json"
    said = json.loads(pointer.read_text("utf-8"))
    pointer.write_text(json.dumps({**said, "variant": "old"}), "utf-8")
    assert refused(TWO_BUILDS, home, "managed").code == "conflict"
    (folder / "site" / "fake_runtime-3.0.dist-info").rename(folder / "moved")
    write_distribution(folder / "site", "fake-runtime-old", "3.0")
    assert served(TWO_BUILDS, home).variant == "old"
    pointer.write_text(json.dumps({**said, "variant": "other"}), "utf-8")
    assert refused(TWO_BUILDS, home, "managed").code == "broken"
