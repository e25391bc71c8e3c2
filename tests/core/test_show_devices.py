"""The text of the command `devices`."""

from __future__ import annotations

import pytest

from sdkit_dispatch import show_devices as module
from sdkit_dispatch.contract import Device
from sdkit_dispatch.show_devices import show_devices

CARD = Device(
    id="pci:0000:01:00.0",
    kind="discrete",
    maker="nvidia",
    name="GeForce RTX 4090",
    arch="sm_89",
    pci_id="10de:2684",
    memory_bytes=24 << 30,
    driver="570.1",
)


def test_a_card_is_listed_with_its_pci_id_and_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "detect", lambda: [CARD])
    show_devices(as_json=False)
    words = "GeForce RTX 4090 (discrete, sm_89, 10de:2684, 24.0 GiB, driver 570.1)"
    assert capsys.readouterr().out == f"pci:0000:01:00.0  {words}\n"
