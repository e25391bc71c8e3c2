"""Wheels are "downloaded" from a folder that pip is told of, so that no index is asked."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from env_fakes import FAKE, write_fake_vendor, write_source, write_wheel
from sdkit_dispatch.env import download, install, platform_name
from sdkit_dispatch.env.download import TARGETS, missing_from
from sdkit_dispatch.env.vendors import requirements_of
from sdkit_dispatch.errors import ConfigError, VendorEnvError

HERE = (platform_name(), f"{sys.version_info.major}.{sys.version_info.minor}")


@pytest.fixture(autouse=True)
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs the fake vendor for this process; its wheels are in a folder that pip knows."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "fake_vendor", raising=False)
    write_fake_vendor(site)
    wheels = write_source(tmp_path / "mirror")
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def names_of(wheels: tuple[Path, ...]) -> set[str]:
    return {wheel.name.split("-")[0].replace("_", "-") for wheel in wheels}


def test_downloaded_folder_is_enough_to_install_from(tmp_path: Path, mirror: Path) -> None:
    to = tmp_path / "на флешке"
    wheels = download(FAKE, to)
    assert names_of(wheels) == {Requirement(line).name for line in requirements_of(FAKE)}
    assert sorted(to.iterdir()) == list(wheels)
    shutil.rmtree(mirror)
    assert install(FAKE, home=tmp_path / "home", source=to).packages == {"fake-runtime": "99.0"}


def test_wheels_that_only_the_other_machine_needs_are_downloaded_for_it(tmp_path: Path) -> None:
    other = "windows-x86_64" if sys.platform != "win32" else "linux-x86_64"
    wheels = download(FAKE, tmp_path / "to", platform=other, python_version="3.13")
    assert ("fake-only-on-windows" in names_of(wheels)) == (other == "windows-x86_64")
    assert "fake-runtime" in names_of(wheels)


def test_wheel_that_cannot_be_had_is_named(tmp_path: Path, mirror: Path) -> None:
    next(mirror.glob("fake_runtime-*")).unlink()
    with pytest.raises(VendorEnvError, match="fake-runtime"):
        download(FAKE, tmp_path / "to")


@pytest.mark.parametrize(
    ("platform", "version"), [("beos-ppc", "3.12"), (None, "3"), (None, "2.7"), (None, "latest")]
)
def test_machine_that_does_not_exist_is_refused(
    tmp_path: Path, platform: str | None, version: str
) -> None:
    with pytest.raises(ConfigError):
        download(FAKE, tmp_path, platform=platform, python_version=version)


def test_missing_wheels_are_found_through_what_the_others_need(tmp_path: Path) -> None:
    write_wheel(tmp_path, "fake-a", "1.0", requires=["fake-b>=2", "fake-c; extra == 'more'"])
    write_wheel(tmp_path, "fake-b", "1.0")
    assert missing_from(tmp_path, ["fake-a"], asked=HERE) == ("fake-b>=2",)
    assert missing_from(tmp_path, ["fake-a[more]"], asked=HERE) == ("fake-b>=2", "fake-c")
    write_wheel(tmp_path, "fake-b", "2.5", requires=["fake-a"])
    assert missing_from(tmp_path, ["fake-a>=1", "fake-a>=3"], asked=HERE) == ("fake-a>=3",)


@pytest.mark.parametrize(
    ("tag", "fitting"),
    [
        ("cp312-cp312-manylinux_2_28_x86_64", {"linux-x86_64"}),
        ("cp312-abi3-manylinux2014_aarch64", {"linux-arm64"}),
        ("cp310-abi3-win_amd64", {"windows-x86_64"}),
        ("cp312-cp312-macosx_11_0_arm64", {"macos-arm64"}),
        ("cp312-cp312-macosx_10_13_x86_64", {"macos-x86_64"}),
        ("cp312-cp312-macosx_11_0_universal2", {"macos-arm64", "macos-x86_64"}),
        ("cp312-cp312-macosx_10_13_universal2", {"macos-arm64", "macos-x86_64"}),
        ("cp311-cp311-manylinux_2_28_x86_64", set()),
        ("py3-none-any", set(TARGETS)),
    ],
)
def test_wheel_counts_for_the_machines_that_its_name_says(
    tmp_path: Path, tag: str, fitting: set[str]
) -> None:
    wheel = write_wheel(tmp_path, "fake-a", "1.0")
    wheel.rename(wheel.with_name(f"fake_a-1.0-{tag}.whl"))
    fits = {
        name for name in TARGETS if not missing_from(tmp_path, ["fake-a"], asked=(name, "3.12"))
    }
    assert fits == fitting
