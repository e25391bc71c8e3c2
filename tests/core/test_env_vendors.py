from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from env_fakes import FAKE, write_distribution, write_fake_vendor
from sdkit_dispatch.env import find_vendors, scan_vendors
from sdkit_dispatch.env.vendors import requirements_of

SHIPPED = {"null", "cpu", "openvino"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fake_vendor", raising=False)
    return tmp_path


def test_shipped_vendors_are_found_best_rank_first() -> None:
    specs = find_vendors()
    assert set(specs) >= SHIPPED
    assert all(name == spec.name for name, spec in specs.items())
    ranks = [spec.rank for spec in specs.values()]
    ranked = [rank for rank in ranks if rank is not None]
    assert ranked == sorted(ranked)
    assert ranks == [*ranked, *[None] * (len(ranks) - len(ranked))]


def test_vendor_of_another_distribution_is_found(site: Path) -> None:
    write_fake_vendor(site)
    assert find_vendors()["fake"] == FAKE


@pytest.mark.parametrize(
    ("module", "entry", "expected"),
    [
        ("import no_such_module_anywhere", "one=m1:S", "ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "one=m2:S", "SystemExit"),
        ("S = 'openvino'", "one=m3:S", "is a str, not a VendorSpec"),
        ("T = 1", "one=m4:S", "AttributeError"),
        ("from env_fakes import FAKE as S", "one=m5:S", "its spec is named 'fake'"),
        ("from env_fakes import FAKE as S", "../one=m6:S", "its name is not like"),
        ("from env_fakes import FAKE as S", "cpu=m7:S", "its spec is named 'fake'"),
    ],
)
def test_broken_vendor_is_reported_and_hides_no_other(
    site: Path, caplog: pytest.LogCaptureFixture, module: str, entry: str, expected: str
) -> None:
    (site / f"{entry.split('=')[1].split(':')[0]}.py").write_text(module, "utf-8")
    write_distribution(site, "broken-vendor", entry_points=entry)
    scan = scan_vendors()
    assert set(scan.specs) >= SHIPPED
    (rejection,) = scan.broken
    assert rejection.vendor == entry.split("=")[0]
    assert "broken-vendor" in rejection.reason
    assert expected in rejection.reason
    assert "broken-vendor" in rejection.hint
    with caplog.at_level(logging.WARNING):
        assert set(find_vendors()) >= SHIPPED
    assert expected in caplog.text


def test_name_of_a_shipped_vendor_cannot_be_taken_over(site: Path) -> None:
    (site / "thief.py").write_text(
        "from dataclasses import replace\nfrom env_fakes import FAKE\n"
        "S = replace(FAKE, name='cpu')\n",
        "utf-8",
    )
    write_distribution(site, "thief", entry_points="cpu=thief:S")
    scan = scan_vendors()
    assert scan.specs["cpu"].adapter != FAKE.adapter
    assert "sdkit-dispatch brings a vendor of that name" in scan.broken[0].reason


def test_environment_of_a_shipped_vendor_holds_our_dependencies_and_its_extra() -> None:
    specs = find_vendors()
    names = {line.split(">")[0] for line in requirements_of(specs["openvino"])}
    assert names >= {"numpy", "onnx", "tokenizers", "openvino"}
    assert not names & {"onnxruntime", "sdkit-dispatch", "pytest"}
    (runtime,) = requirements_of(specs["openvino"], runtime_only=True)
    assert runtime.startswith("openvino>=")
    assert requirements_of(specs["null"], runtime_only=True) == ()


def test_third_party_vendor_brings_its_own_requirements_and_never_itself_or_us(
    site: Path,
) -> None:
    requires = (
        "sdkit-dispatch>=0.1",
        "fake-helper[fast]>=1; python_version >= '3'",
        "fake-nowhere; sys_platform == 'beos'",
        "fake-vendor[base]; extra == 'runtime'",
        "fake-runtime>=2; extra == 'base'",
        "fake-other; extra == 'docs'",
        "not a requirement at all",
    )
    write_fake_vendor(site, requires=requires)
    assert requirements_of(FAKE, runtime_only=True) == ("fake-runtime>=2",)
    lines = requirements_of(FAKE)
    assert lines[-2:] == ("fake-helper[fast]>=1", "fake-runtime>=2")
    assert any(line.startswith("numpy") for line in lines)
    assert not any("sdkit" in line or "fake-vendor" in line for line in lines)


def test_requirements_for_another_machine_follow_its_markers(site: Path) -> None:
    requires = (
        "fake-a; sys_platform == 'win32' and extra == 'runtime'",
        "fake-b; sys_platform != 'win32' and extra == 'runtime'",
    )
    write_fake_vendor(site, requires=requires)
    for system, expected in (("win32", "fake-a"), ("linux", "fake-b")):
        values = {"sys_platform": system}
        assert requirements_of(FAKE, runtime_only=True, marker_values=values) == (expected,)
