"""The data: PCI ids, architectures, support ranges."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sdkit_dispatch.detect as package
from sdkit_dispatch.contract import Device
from sdkit_dispatch.detect import Host
from sdkit_dispatch.detect.amd import gfx_from_target_version
from sdkit_dispatch.detect.make_pci_table import table_from_sources
from sdkit_dispatch.detect.pci_table import pci_entry
from sdkit_dispatch.detect.support import (
    Candidate,
    engines_for,
    is_in_range,
    support_table,
    variant_for,
    version_tuple,
)

FOLDER = Path(package.__file__).parent
MAX_TABLE_BYTES = 150_000
"""Of the wheel; also what is read when a GPU is met."""
LINUX = Host(os="linux", arch="x86_64", python="3.12", kernel="6.8.0", libc="glibc 2.39")


@pytest.mark.parametrize(
    ("pci_id", "arch"),
    [
        # Ids that other tools are known to take for a neighbour.
        ("1002:13c0", "gfx1036"),
        ("1002:1114", "gfx1152"),
        ("1002:1902", "gfx1153"),
        ("1002:1506", "gfx1037"),
        ("10de:20b0", "sm_80"),  # GA100 is not 8.6
        ("10de:2901", "sm_100"),  # GB100 is not 12.0
        ("10de:3182", "sm_103"),
        ("10de:2e12", "sm_121"),  # GB10 is not 12.0
        ("10de:15f8", "sm_60"),  # GP100 is not 6.1
        ("10de:1b06", "sm_61"),
        ("10de:1db4", "sm_70"),
        ("10de:102d", "sm_37"),
        ("1002:75a3", "gfx950"),
        ("1002:67df", "gfx803"),
        ("1002:6811", "gfx601"),
        ("8086:56a0", "xe-hpg"),
        ("8086:7d55", "xe-lpg"),
        ("8086:64a0", "xe2-lpg"),
        ("8086:b080", "xe3-lpg"),
    ],
)
def test_the_architecture_of_ids_that_are_often_got_wrong(pci_id: str, arch: str) -> None:
    entry = pci_entry(pci_id)
    assert entry is not None
    assert entry.arch == arch


@pytest.mark.parametrize(
    ("pci_id", "kind"),
    [
        ("8086:46a6", "integrated"),
        ("8086:a780", "integrated"),
        ("8086:7d55", "integrated"),  # named Arc
        ("8086:64a0", "integrated"),  # named Arc
        ("8086:4905", "discrete"),  # named Iris Xe
        ("8086:e20b", "discrete"),
        ("1002:164e", "integrated"),
        ("1002:1586", "integrated"),
        ("1002:744c", "discrete"),
        ("10de:2e12", "integrated"),
        ("8086:643e", "npu"),
        ("1022:1502", "npu"),
    ],
)
def test_integrated_and_discrete_are_told_apart(pci_id: str, kind: str) -> None:
    entry = pci_entry(pci_id)
    assert entry is not None
    assert entry.kind == kind


@pytest.mark.parametrize("pci_id", ["10de:228b", "1002:ab38", "8086:1234", "1234:1111", "x", ""])
def test_functions_that_are_no_display_are_not_in_the_table(pci_id: str) -> None:
    assert pci_entry(pci_id) is None


def test_the_table_is_small_sorted_and_whole() -> None:
    data = (FOLDER / "gpus.tsv").read_bytes()
    assert len(data) < MAX_TABLE_BYTES
    rows = [line for line in data.decode().splitlines() if not line.startswith("#")]
    assert rows == sorted(rows)
    for row in rows:
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{4}\t[a-z0-9_-]*\t[din]\t[^\t]+", row), row
    assert "Martin Mares" in (FOLDER / "gpus.LICENSE").read_text(encoding="utf-8")


def test_the_script_takes_the_longest_chip_and_the_name_in_brackets() -> None:
    pci_ids = (
        "#\tVersion: 2026.01.01\n"
        "10de  NVIDIA Corporation\n"
        "\t2684  AD102 [GeForce RTX 4090]\n\t\t10de 16f1  Board\n"
        "\t22ba  AD102 High Definition Audio Controller\n"
        "\t2e12  GB20B [GB10]\n"
        "C 03  Display controller\n\t00  VGA compatible controller\n"
    )
    chips = (
        "10de\tAD10\tsm_89\tdiscrete\n"
        "10de\tGB20\tsm_120\tdiscrete\n"
        "10de\tGB20B\tsm_121\tintegrated\n"
    )
    rows = table_from_sources(pci_ids, chips + "10de\t9999\tsm_999\tdiscrete\tA New Card\n")
    assert rows.splitlines()[3:] == [
        "10de:2684\tsm_89\td\tGeForce RTX 4090",
        "10de:2e12\tsm_121\ti\tGB10",
        "10de:9999\tsm_999\td\tA New Card",
    ]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (100306, "gfx1036"),
        (110003, "gfx1103"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
        (80003, "gfx803"),
        (100307, "gfx1037"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (0, ""),
        (99999999, ""),
    ],
)
def test_target_versions_of_the_kernel_are_named_as_llvm_does(version: int, name: str) -> None:
    assert gfx_from_target_version(version) == name


def test_every_support_row_has_a_source_and_a_date() -> None:
    rows, _ = support_table()
    for row in rows:
        assert row.source.startswith(("https://", "PyPI, project "))
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row.date), row


def test_what_a_problem_rules_out_is_an_engine_of_the_table() -> None:
    rows, ruled_out = support_table()
    names = {"all"} | {row.engine for row in rows} | {f"{r.engine}/{r.backend}" for r in rows}
    for code, engines in ruled_out.items():
        assert set(engines) <= names, code


def test_every_problem_code_is_explained_and_every_ruled_out_one_exists() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    words = set(re.findall(r'"([a-z0-9-]+)"', "".join(sources.values())))
    _, ruled_out = support_table()
    assert set(ruled_out) <= words
    # The codes of support.py are those of rejections.
    said = {
        code
        for name, text in sources.items()
        if name != "support.py"
        for code in re.findall(r'code(?:=|, message = )"([a-z0-9-]+)"', text)
    }
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for code in said | set(ruled_out):
        assert f"`{code}`" in readme, code


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("10.2.0", ">=10.2", True),
        ("10.1.9", ">=10.1,<10.2", True),
        ("10.2", ">=10.1,<10.2", False),
        ("7.2.4", ">=7.14,<10.0", False),
        ("7.14", ">=7.14,<10.0", True),
        ("6.2", ">=6.2", True),
        ("3.11", ">=3.10,<3.15", True),
        ("anything", "", True),
        ("", ">=1", False),
    ],
)
def test_version_ranges(version: str, wanted: str, expected: bool) -> None:
    assert is_in_range(version, wanted) is expected


def test_versions_are_numbers_and_not_texts() -> None:
    assert version_tuple("6.8.0-48-generic") == (6, 8, 0)
    assert version_tuple("580.95.05") > version_tuple("58.0")
    assert version_tuple("banana") == ()


def nvidia(arch: str, driver: str) -> Device:
    return Device(
        id="pci:0000:01:00.0",
        kind="discrete",
        maker="nvidia",
        name="Card",
        arch=arch,
        driver=driver,
    )


@pytest.mark.parametrize(
    ("arch", "driver", "first", "variant"),
    [
        ("sm_89", "580.95.05", "tensorrt-rtx", "cu13"),
        ("sm_89", "550.107.02", "tensorrt-rtx", "cu12"),
        ("sm_120", "570.86", "tensorrt-rtx", "cu12"),
        ("sm_80", "580.95.05", "tensorrt", "cu13"),
        ("sm_90", "535.104", "tensorrt", "cu12"),
        ("sm_61", "580.95.05", "ggml-vulkan", ""),
        ("sm_121", "580.95.05", "tensorrt-rtx", "cu13"),
        ("sm_100", "580.95.05", "tensorrt", "cu13"),
    ],
)
def test_the_driver_and_the_architecture_choose_engine_and_build(
    arch: str, driver: str, first: str, variant: str
) -> None:
    best = engines_for(nvidia(arch, driver), LINUX)[0]
    assert isinstance(best, Candidate)
    assert (best.name, best.variant) == (first, variant)


def test_the_build_of_a_vendor_is_that_of_the_best_card_it_serves() -> None:
    old, new = nvidia("sm_89", "550.107.02"), nvidia("sm_89", "580.95.05")
    assert variant_for("tensorrt-rtx", [old], LINUX) == "cu12"
    assert variant_for("tensorrt-rtx", [new, old], LINUX) == "cu13"
    assert variant_for("tensorrt-rtx", [nvidia("sm_61", "580.95.05")], LINUX) == ""


@pytest.mark.parametrize(
    ("arch", "code", "hint"),
    [
        ("sm_80", "needs-force", "--vendor tensorrt-rtx --force"),
        ("sm_90", "arch", "--vendor tensorrt"),
        ("sm_100", "arch", "--vendor tensorrt"),
        ("sm_61", "arch", "--vendor ggml"),
    ],
)
def test_an_architecture_that_an_engine_does_not_serve_names_what_does(
    arch: str, code: str, hint: str
) -> None:
    verdicts = engines_for(nvidia(arch, "580.95.05"), LINUX)
    no = next(v for v in verdicts if getattr(v, "vendor", "") == "tensorrt-rtx")
    assert (no.code, no.hint) == (code, hint)


@pytest.mark.parametrize(("arch", "driver"), [("sm_89", "470.256"), ("sm_120", "565.57")])
def test_a_driver_that_is_too_old_says_which_one_is_needed(arch: str, driver: str) -> None:
    verdicts = engines_for(nvidia(arch, driver), LINUX)
    no = next(v for v in verdicts if getattr(v, "vendor", "") == "tensorrt-rtx")
    assert no.code == "driver-too-old"
    assert driver in no.reason
    assert "update the driver" in no.hint


@pytest.mark.parametrize(
    ("rocm", "arch", "release"),
    [
        ("10.2.1", "gfx1103", "2.19"),
        ("10.1.0", "gfx1150", "2.18"),
        ("10.0.0", "gfx1201", "2.17"),
        ("", "gfx1201", "2.17"),
        ("7.14.1", "gfx942", "2.16"),
        ("7.2.4", "gfx1100", "2.15"),
        ("10.1.0", "gfx1103", None),
        ("7.14.1", "gfx1201", None),
        ("10.2.1", "gfx1030", None),
        ("10.2.1", "gfx906", None),
        ("6.4.1", "gfx1100", None),
    ],
)
def test_migraphx_follows_the_installed_rocm(rocm: str, arch: str, release: str | None) -> None:
    from dataclasses import replace

    device = Device(id="pci:0000:03:00.0", kind="discrete", maker="amd", name="Card", arch=arch)
    verdicts = engines_for(device, replace(LINUX, rocm=rocm))
    found = [v.release for v in verdicts if isinstance(v, Candidate) and v.engine == "migraphx"]
    assert found == ([release] if release else [])


def test_detection_imports_no_numpy_no_onnx_no_vendor_and_no_yaml() -> None:
    code = (
        "import sys; from sdkit_dispatch.detect import detect, host; detect(); host();"
        "print([n for n in ('numpy', 'onnx', 'onnxruntime', 'openvino', 'torch', 'yaml', 'rich')"
        " if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
