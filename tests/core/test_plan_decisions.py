"""The ladder, choices, reasons and advice; vendors are asked through a recorded stand-in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from detect_machines import (
    Card,
    FakeProbe,
    amd_card,
    kfd_files,
    linux,
    mac,
    nvml,
    nvml_gpu,
    pnp,
    windows,
)
from sdkit_dispatch.contract import (
    Device,
    Plan,
    Precision,
    Rejection,
    VendorSpec,
    record_from_json,
    record_to_json,
)
from sdkit_dispatch.detect import Host, detect, host
from sdkit_dispatch.detect.choice import select_devices
from sdkit_dispatch.errors import ConfigError
from sdkit_dispatch.plan import (
    Decision,
    explain_rejections,
    make_plans,
    unsupported_vendors,
)

GPUS = ("discrete", "integrated")


def spec(name: str, rank: int | None, **rest: Any) -> VendorSpec:
    return VendorSpec(
        name=name,
        extra=name,
        adapter=f"sdkit_{name}.adapter:Adapter",
        revision=1,
        rank=rank,
        **{"device_kinds": ("cpu", *GPUS, "npu"), **rest},
    )


NULL = spec("null", None)
CPU = spec("cpu", 20, device_kinds=("cpu",))
OPENVINO = spec("openvino", 10)
GGML = spec("ggml", 90)
TENSORRT_RTX = spec("tensorrt-rtx", 10, device_kinds=GPUS)
NOW = (NULL, CPU, OPENVINO)
"""The vendors of the first release."""
LATER = (*NOW, GGML, TENSORRT_RTX, spec("migraphx", 10, device_kinds=GPUS))
READY = {name: "ready" for name in ("null", "cpu", "openvino", "ggml", "tensorrt-rtx", "migraphx")}


class RecordingVendors:
    """Stands in for the workers: says yes unless told otherwise, and remembers what was asked."""

    def __init__(self, refused: Mapping[str, str] | None = None) -> None:
        self.refused = refused or {}
        self.asked: list[tuple[str, str]] = []

    def __call__(
        self, spec: VendorSpec, device: Device, precision: Precision | None, options: Any
    ) -> Plan | Rejection:
        self.asked.append((spec.name, device.id))
        if spec.name in self.refused:
            return Rejection(
                vendor=spec.name, code="broken-runtime", reason=self.refused[spec.name]
            )
        return Plan(
            vendor=spec.name,
            device=device,
            precision=precision or "fp16",
            runtime=f"{spec.name} 1.0",
            options=options,
            reasons=("the runtime says so",),
        )


def decide(machine: FakeProbe, specs: tuple[VendorSpec, ...] = NOW, **rest: Any) -> Decision:
    rest.setdefault("probe", RecordingVendors())
    rest.setdefault("env_states", READY)
    return make_plans(detect(machine), host(machine), specs, **rest)


def order(decision: Decision) -> list[tuple[str, str]]:
    return [(plan.vendor, plan.device.id) for plan in decision.plans]


def reason(decision: Decision, vendor: str, device: str = "cpu") -> Rejection:
    (found,) = [r for r in decision.rejections if (r.vendor, r.device) == (vendor, device)]
    return found


def gaming_pc() -> FakeProbe:
    """An RTX 4090 beside the graphics of an Intel processor."""
    return linux(
        Card(address="0000:00:02.0", pci_id="8086:a780", driver="i915", render="renderD128"),
        Card(address="0000:01:00.0", pci_id="10de:2684", driver="nvidia"),
        nvml=nvml(nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 4090", (8, 9), 24)),
    )


def test_the_ladder_goes_from_vendor_engines_to_ggml_to_the_cpu() -> None:
    card, igpu = "pci:0000:01:00.0", "pci:0000:00:02.0"
    assert order(decide(gaming_pc(), LATER)) == [
        ("tensorrt-rtx", card),
        ("ggml", card),
        ("openvino", igpu),
        ("ggml", igpu),
        ("openvino", "cpu"),
        ("cpu", "cpu"),
        ("ggml", "cpu"),
    ]


def test_this_release_takes_the_next_and_says_what_it_lacks() -> None:
    decision = decide(gaming_pc())
    assert order(decision)[0] == ("openvino", "pci:0000:00:02.0")
    no = reason(decision, "tensorrt-rtx", "pci:0000:01:00.0")
    assert no.code == "not-in-this-release"
    assert "TensorRT-RTX" in no.reason


def test_every_pair_is_a_plan_or_has_exactly_one_reason() -> None:
    for specs in (NOW, LATER):
        decision = decide(gaming_pc(), specs)
        pairs = order(decision) + [(r.vendor, r.device) for r in decision.rejections]
        assert len(pairs) == len(set(pairs))
        vendors = {vendor for vendor, _ in pairs}
        assert vendors >= {s.name for s in specs} | {"tensorrt", "migraphx", "ggml", "cuda"}
        assert len(pairs) == len(vendors) * 3


def test_on_the_cpu_the_order_is_data() -> None:
    assert order(decide(linux())) == [("openvino", "cpu"), ("cpu", "cpu")]
    swapped = (spec("cpu", 1, device_kinds=("cpu",)), OPENVINO)
    assert order(decide(linux(), swapped))[0] == ("cpu", "cpu")


def test_the_card_that_owns_more_memory_comes_first() -> None:
    probe = linux(
        Card(address="0000:01:00.0", pci_id="10de:2504", driver="nvidia"),
        Card(address="0000:02:00.0", pci_id="10de:2684", driver="nvidia"),
        nvml=nvml(
            nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 3060", (8, 6), 12),
            nvml_gpu("00000000:02:00.0", "NVIDIA GeForce RTX 4090", (8, 9), 24),
        ),
    )
    assert order(decide(probe, LATER))[0] == ("tensorrt-rtx", "pci:0000:02:00.0")


def test_without_leave_to_install_what_is_installed_serves_and_the_gain_is_said() -> None:
    states = {"cpu": "ready", "openvino": "installable"}
    decision = decide(linux(), env_states=states, may_install=False)
    assert order(decision) == [("cpu", "cpu"), ("openvino", "cpu")]
    assert decision.plans[1].state == "installable"
    assert any("vendors install openvino" in advice for advice in decision.advice)


def test_with_leave_to_install_the_better_vendor_is_planned_and_not_asked() -> None:
    vendors = RecordingVendors()
    decision = decide(
        linux(), env_states={"cpu": "ready"}, may_install=True, probe=vendors, precision="bf16"
    )
    assert order(decision)[0] == ("openvino", "cpu")
    assert decision.plans[0].state == "installable"
    assert (decision.plans[0].precision, decision.plans[0].runtime) == ("bf16", "")
    assert vendors.asked == [("cpu", "cpu")]


def test_a_vendor_that_refuses_is_passed_over_with_its_own_words() -> None:
    vendors = RecordingVendors({"openvino": "libfoo.so is missing"})
    decision = decide(linux(), probe=vendors)
    assert order(decision) == [("cpu", "cpu")]
    assert reason(decision, "openvino").reason == "libfoo.so is missing"
    assert reason(decision, "openvino").device == "cpu"


def test_a_vendor_without_a_rank_is_used_only_when_it_is_named() -> None:
    decision = decide(linux())
    assert reason(decision, "null").code == "only-when-named"
    named = decide(linux(), vendor="null")
    assert order(named) == [("null", "cpu")]
    assert reason(named, "cpu").code == "not-selected"


def test_options_reach_the_vendor_that_owns_them() -> None:
    decision = decide(linux(), options={"openvino": {"threads": 2}, "cpu": {}})
    assert [dict(plan.options) for plan in decision.plans] == [{"threads": 2}, {}]


@pytest.mark.parametrize("state", ["broken", "unsupported"])
def test_an_environment_that_cannot_be_used_is_a_reason(state: str) -> None:
    decision = decide(linux(), env_states={"cpu": "ready", "openvino": state})
    assert reason(decision, "openvino").code == f"env-{state}"


def test_a_neural_processor_is_used_only_when_it_is_named() -> None:
    probe = linux(
        Card(address="0000:00:0b.0", pci_id="8086:643e", driver="intel_vpu", pci_class=0x120000),
        release="6.11.0",
    )
    automatic = decide(probe)
    assert order(automatic)[0] == ("openvino", "cpu")
    assert reason(automatic, "openvino", "pci:0000:00:0b.0").code == "only-when-named"
    assert order(decide(probe, gpu="npu")) == [("openvino", "pci:0000:00:0b.0")]


@pytest.mark.parametrize(
    ("choice", "device"),
    [
        ("cpu", "cpu"),
        ("gpu:0", "pci:0000:00:02.0"),
        ("gpu:1", "pci:0000:01:00.0"),
        ("GPU:1", "pci:0000:01:00.0"),
        ("pci:0000:01:00.0", "pci:0000:01:00.0"),
        ("0000:01:00.0", "pci:0000:01:00.0"),
        ("4090", "pci:0000:01:00.0"),
        ("geforce", "pci:0000:01:00.0"),
        ("sm_89", "pci:0000:01:00.0"),
        ("10de:2684", "pci:0000:01:00.0"),
    ],
)
def test_a_device_is_chosen_by_number_id_or_a_piece_of_its_name(choice: str, device: str) -> None:
    assert [d.id for d in select_devices(detect(gaming_pc()), choice)] == [device]


@pytest.mark.parametrize("choice", ["gpu:2", "5090", "npu", "gpu:x", "pci:0000:09:00.0"])
def test_a_choice_that_is_no_device_lists_what_exists(choice: str) -> None:
    with pytest.raises(ConfigError, match="4090") as caught:
        decide(gaming_pc(), gpu=choice)
    assert repr(choice) in caught.value.message


def test_a_choice_of_several_devices_lists_them() -> None:
    probe = linux(
        *(Card(address=f"0000:0{n}:00.0", pci_id="10de:2684", driver="nvidia") for n in (1, 2))
    )
    with pytest.raises(ConfigError, match="2 devices") as caught:
        decide(probe, gpu="4090")
    assert "pci:0000:01:00.0" in caught.value.hint


def test_a_chosen_gpu_never_falls_back_to_the_cpu() -> None:
    decision = decide(gaming_pc(), gpu="gpu:1")
    assert decision.plans == ()
    assert reason(decision, "openvino").code == "not-selected"


def test_an_unknown_vendor_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="null") as caught:
        decide(linux(), vendor="openvin")
    assert "openvino" in caught.value.hint


def test_a_vendor_of_the_table_without_an_adapter_is_known_but_not_available() -> None:
    decision = decide(gaming_pc(), vendor="tensorrt-rtx")
    assert decision.plans == ()
    assert "no adapter for it yet" in explain_rejections(decision)


def test_no_plan_at_all_explains_every_device() -> None:
    probe = linux(python=(3, 9, 0), machine="riscv64")
    decision = decide(probe)
    assert decision.plans == ()
    text = explain_rejections(decision)
    assert "openvino: OpenVINO 2026.4 has no build for linux-riscv64" in text
    assert all(f"[{r.code}]" in text for r in decision.rejections)


def test_an_old_driver_is_the_first_advice() -> None:
    probe = linux(
        Card(address="0000:01:00.0", pci_id="10de:2684", driver="nvidia"),
        nvml=nvml(
            nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 4090", (8, 9), 24), driver="470.256"
        ),
    )
    decision = decide(probe, LATER)
    assert order(decision)[0] == ("ggml", "pci:0000:01:00.0")
    assert "580 or newer" in decision.advice[0]


def test_an_installed_but_older_driver_still_plans_and_advises() -> None:
    probe = windows(pnp("10de:2d04", driver="32.0.15.7652", service="nvlddmkm"))
    decision = decide(probe, LATER)
    assert decision.plans[0].vendor == "tensorrt-rtx"
    assert any("CUDA 12" in sentence for sentence in decision.plans[0].reasons)
    assert any("580" in advice for advice in decision.advice)


def test_an_engine_with_a_penalty_on_a_card_comes_after_its_rivals() -> None:
    probe = linux(
        Card(address="0000:01:00.0", pci_id="10de:1e04", driver="nvidia"),
        nvml=nvml(nvml_gpu("00000000:01:00.0", "NVIDIA GeForce RTX 2080 Ti", (7, 5), 11)),
    )
    both = (*LATER, spec("tensorrt", 20, device_kinds=GPUS))
    states = {**READY, "tensorrt": "ready"}
    vendors = [vendor for vendor, _ in order(decide(probe, both, env_states=states))]
    assert vendors.index("tensorrt") < vendors.index("tensorrt-rtx")


def test_with_nothing_installed_and_no_leave_the_advice_is_what_to_install() -> None:
    decision = decide(linux(), env_states={}, may_install=False)
    assert decision.plans[0].state == "installable"
    assert decision.advice == ("sdkit-dispatch vendors install openvino",)


def test_advice_is_only_of_what_the_user_can_change() -> None:
    decision = decide(linux())
    assert decision.advice == ()


def test_a_missing_kfd_is_advised_for_the_card_that_would_gain() -> None:
    probe = linux(amd_card("0000:03:00.0", "1002:7550"))
    decision = decide(probe, LATER)
    assert order(decision)[0] == ("ggml", "pci:0000:03:00.0")
    assert any("/dev/kfd" in advice for advice in decision.advice)


def test_the_unsupported_integrated_gpu_does_not_hide_the_card() -> None:
    probe = linux(
        amd_card("0000:03:00.0", "1002:164e", vram_bytes=2**29),
        amd_card("0000:0e:00.0", "1002:7550", render="renderD129", vram_bytes=2**34),
        files=kfd_files((100306, "164e", "0000:03:00.0"), (120001, "7550", "0000:0e:00.0")),
    )
    assert order(decide(probe, LATER))[0] == ("migraphx", "pci:0000:0e:00.0")


def test_apple_chips_wait_for_ggml_and_serve_with_their_cpu() -> None:
    decision = decide(mac(brand="Apple M3"))
    assert order(decision)[0] == ("openvino", "cpu")
    assert reason(decision, "ggml", "metal:0").code == "not-in-this-release"


def test_a_third_party_vendor_is_judged_by_its_spec() -> None:
    other = spec("acme", 5, device_kinds=("discrete",), pci_vendors=("10de",))
    decision = decide(gaming_pc(), (*NOW, other), env_states={**READY, "acme": "ready"})
    assert order(decision)[0] == ("acme", "pci:0000:01:00.0")
    assert reason(decision, "acme", "pci:0000:00:02.0").code == "other-kind"
    wrong = spec("acme", 5, platforms=("windows-x86_64",))
    assert reason(decide(linux(), (*NOW, wrong)), "acme").code == "platform"


def test_a_spec_narrower_than_the_table_wins() -> None:
    narrow = spec("openvino", 10, device_kinds=("cpu",))
    decision = decide(gaming_pc(), (NULL, CPU, narrow))
    assert order(decision)[0] == ("openvino", "cpu")
    assert reason(decision, "openvino", "pci:0000:00:02.0").code == "other-kind"


def test_a_decision_survives_json() -> None:
    decision = decide(gaming_pc(), LATER)
    text = json.dumps(record_to_json(decision))
    assert record_from_json(Decision, json.loads(text)) == decision


def test_a_plan_says_what_is_wrong_with_its_device() -> None:
    probe = linux(
        amd_card("0000:03:00.0", "1002:7550"),
        files=kfd_files((120001, "7550", "0000:03:00.0")),
        env={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"},
    )
    assert any("HSA_OVERRIDE_GFX_VERSION" in s for s in decide(probe, LATER).plans[0].reasons)


def test_an_absent_device_is_planned_from_the_table() -> None:
    absent = Device(
        id="sm_89", kind="discrete", maker="nvidia", name="sm_89", arch="sm_89", is_absent=True
    )
    machine = Host(os="linux", arch="x86_64", python="3.12")
    decision = make_plans([absent], machine, LATER, probe=RecordingVendors())
    assert decision.plans[0].vendor == "tensorrt-rtx"
    assert decision.plans[0].state == "installable"


def test_vendors_that_serve_nothing_here_are_named_with_the_nearest_reason() -> None:
    probe = linux()
    refused = unsupported_vendors(detect(probe), host(probe), LATER)
    assert set(refused) == {"tensorrt-rtx", "migraphx"}
    old = linux(Card(address="0000:01:00.0", pci_id="10de:1b06", driver="nvidia"))
    refused = unsupported_vendors(detect(old), host(old), LATER)
    assert refused["tensorrt-rtx"].code == "arch"
    assert "sm_61" in refused["tensorrt-rtx"].reason


def test_no_vendor_that_serves_a_device_here_is_called_unsupported() -> None:
    probe = gaming_pc()
    refused = unsupported_vendors(detect(probe), host(probe), LATER)
    assert set(refused) == {"migraphx"}


def test_why_no_environment_serves_is_said_as_it_is() -> None:
    why = Rejection(vendor="openvino", code="no-python", reason="there is no Python in /x")
    decision = decide(linux(), env_states={**READY, "openvino": why})
    assert reason(decision, "openvino") == replace(why, device="cpu")
    assert order(decision)[0] == ("cpu", "cpu")


def test_card_that_the_makers_do_not_list_is_asked_about_only_with_force() -> None:
    a100 = Card(address="0000:01:00.0", pci_id="10de:20b2", driver="nvidia")
    found = nvml_gpu("00000000:01:00.0", "NVIDIA A100-SXM4-80GB", (8, 0), 80)
    machine = linux(a100, nvml=nvml(found))
    card = "pci:0000:01:00.0"
    unforced = decide(machine, LATER, vendor="tensorrt-rtx")
    assert unforced.plans == ()
    no = reason(unforced, "tensorrt-rtx", card)
    assert (no.code, no.hint) == ("needs-force", "--vendor tensorrt-rtx --force")
    for wrong in ({"tensorrt-rtx": {"force": False}}, {"ggml": {"force": True}}):
        assert decide(machine, LATER, vendor="tensorrt-rtx", options=wrong).plans == ()
    options = {"tensorrt-rtx": {"force": True}}
    forced = decide(machine, LATER, vendor="tensorrt-rtx", options=options)
    assert order(forced) == [("tensorrt-rtx", card)]
