"""Makes the examples and the schema of `plan --json`; run it to write them anew.

The machines are fakes of `detect_machines`; detection and planning are the real ones, with the
vendors of this release, none of them installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

import sdkit_dispatch
from detect_machines import Card, FakeProbe, dxgi, linux, mac, nvml, nvml_gpu, pnp, windows
from sdkit_dispatch.contract import record_to_json
from sdkit_dispatch.detect import detect, host
from sdkit_dispatch.env import find_vendors
from sdkit_dispatch.plan import make_plans
from sdkit_dispatch.plan_report import PlanReport, plan_report

FOLDER = Path(sdkit_dispatch.__file__).with_name("_data") / "schemas"
SCHEMA = FOLDER / "plan.schema.json"
MACHINES: dict[str, FakeProbe] = {
    "linux": linux(
        Card(address="0000:01:00.0", pci_id="10de:2684", driver="nvidia"),
        nvml=nvml(nvml_gpu("0000:01:00.0", "NVIDIA GeForce RTX 4090", (8, 9), 24)),
    ),
    "windows": windows(
        pnp("8086:a780", address="0000:00:02.0", driver="32.0.101.6314", service="igfxn"),
        pnp("8086:e20b", address="0000:03:00.0", driver="32.0.101.6314", service="igfxnd"),
        adapters=[
            dxgi("8086:a780", "Intel(R) UHD Graphics 770", 0.125, luid="00000000:00011f3c"),
            dxgi("8086:e20b", "Intel(R) Arc(TM) B580 Graphics", 12, luid="00000000:00012a7d"),
        ],
    ),
    "macos": mac(brand="Apple M3 Max", displays=[{"sppci_model": "Apple M3 Max"}]),
}


def example(platform: str) -> PlanReport:
    """Returns what `plan --json` says on one machine."""
    probe = MACHINES[platform]
    devices, machine = detect(probe), host(probe)
    specs = find_vendors()

    def never(spec: object, device: object, precision: object, options: object) -> Any:  # Any: none
        raise AssertionError("nothing is installed")

    states = dict.fromkeys(specs, "installable")
    decision = make_plans(devices, machine, list(specs.values()), env_states=states, probe=never)
    return plan_report(machine, devices, decision, states)


def documents() -> dict[Path, str]:
    """Returns the files that belong into the package, with their content."""
    schema = msgspec.json.schema(PlanReport)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "What `sdkit-dispatch plan --json` prints"
    found = {SCHEMA: schema}
    for platform in MACHINES:
        found[FOLDER / f"plan-{platform}.json"] = record_to_json(example(platform))
    return {path: json.dumps(content, indent=1) + "\n" for path, content in found.items()}


if __name__ == "__main__":
    for path, content in documents().items():
        path.write_text(content, encoding="utf-8")
