"""A driver that was replaced makes a vendor be asked again, though no version says so."""

import os
from pathlib import Path

import pytest

from sdkit_dispatch.contract import Device, Plan
from sdkit_dispatch.detect import graphics
from sdkit_dispatch.detect.graphics import graphics_state
from sdkit_null import SPEC
from toy_bench import CPU, new_workers

CARD = Device(id="pci:0000:03:00.0", kind="discrete", maker="amd", name="a card", driver="amdgpu")
DAY_NS = 86_400 * 10**9


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of drivers, with one of them."""
    folder = tmp_path / "icd.d"
    folder.mkdir()
    (folder / "radeon_icd.json").write_text("{}")
    monkeypatch.setattr(graphics, "SYSTEM_FOLDERS", (str(folder),))
    return folder


def replace_driver(folder: Path) -> None:
    """A package of another release: the same text, a later date."""
    path = folder / "radeon_icd.json"
    later_ns = path.stat().st_mtime_ns + DAY_NS
    os.utime(path, ns=(later_ns, later_ns))


def remove_driver(folder: Path) -> None:
    (folder / "radeon_icd.json").unlink()


def add_driver(folder: Path) -> None:
    (folder / "lvp_icd.json").write_text("{}")


@pytest.mark.parametrize("change", [replace_driver, remove_driver, add_driver])
def test_a_change_of_a_driver_is_seen(drivers: Path, change) -> None:
    before = graphics_state({})
    assert graphics_state({}) == before
    change(drivers)
    assert graphics_state({}) != before


def test_a_driver_that_a_variable_names_is_seen_and_so_is_one_that_is_not_there(
    drivers: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    environ = {"VK_DRIVER_FILES": os.pathsep.join([str(own), str(tmp_path / "none")])}
    before = graphics_state(environ)
    own.write_text("{}")
    assert graphics_state(environ) != before


@pytest.mark.parametrize("name", ["VK_ICD_FILENAMES", "GGML_VK_VISIBLE_DEVICES"])
def test_a_variable_that_chooses_devices_counts_and_others_do_not(drivers: Path, name: str) -> None:
    assert graphics_state({name: "1"}) != graphics_state({})
    assert graphics_state({"EDITOR": "vi"}) == graphics_state({})


def test_a_remembered_yes_of_a_gpu_does_not_outlive_its_driver(
    drivers: Path, tmp_path: Path
) -> None:
    def answers() -> int:
        return len(list((tmp_path / "home/scratch/probes").glob("*.json")))

    with new_workers(tmp_path / "home") as workers:
        seen = []
        for device in (CPU, CARD, CARD):
            assert isinstance(workers.probe(SPEC, device, None, {}), Plan)
            seen.append(answers())
        replace_driver(drivers)
        for device in (CPU, CARD):
            assert isinstance(workers.probe(SPEC, device, None, {}), Plan)
            seen.append(answers())
    assert seen == [1, 2, 2, 2, 3]  # what the processor was asked is remembered still
