"""The ladder: every failure takes the next step once, is said, is remembered, and is cleared."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest
from PIL import Image

from sdkit_dispatch import api, reference
from sdkit_dispatch.__main__ import main
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import Device, Progress, no_report
from sdkit_dispatch.errors import ERROR_KINDS, DispatchError
from sdkit_null import SPEC
from toy_bench import CPU, Bench, new_workers
from toy_pipeline import make_toy_pipeline

pytestmark = pytest.mark.usefixtures("null_is_the_reference")

GPU = Device(
    id="pci:0000:01:00.0",
    kind="discrete",
    maker="amd",
    name="Radeon RX 9070 XT",
    arch="gfx1201",
    pci_id="1002:7550",
    pci_address="0000:01:00.0",
    driver="6.14",
)
HANG_S = 0.5
"""How long the request may take that is meant to hang."""
FAILURES = {
    # fault of the null vendor -> error, words of its reason
    "compile_error": ("CompileError", "the compiler refuses this graph"),
    "unsupported_op": ("UnsupportedOpError", "Frobnicate, Wibble"),
    "crash_on_compile": ("WorkerError", "crashing in compile of text_encoder"),
    "hang_on_compile": ("WorkerError", "'compile' took longer than 0.5 s"),
    "out_of_memory_on_compile": ("WorkerError", "no memory in compile of text_encoder"),
    "load_error": ("CacheError", "the engine does not open"),
    "crash_on_load": ("WorkerError", "crashing in load of text_encoder"),
    "hang_on_load": ("WorkerError", "took longer than 0.5 s"),
    "out_of_memory_on_load": ("WorkerError", "no memory in load of text_encoder"),
    "run_error": ("RunError", "the device failed"),
    "device_lost": ("RunError", "the device was lost"),
    "crash_on_run": ("WorkerError", "crashing in run of text_encoder"),
    "hang_on_run": ("WorkerError", "took longer than 0.5 s"),
    "out_of_memory_on_run": ("WorkerError", "no memory in run of text_encoder"),
    "nan": ("NumericError", "not finite"),
    "constant": ("NumericError", "flat"),
    "drift": ("NumericError", "off by"),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_pipeline(tmp_path_factory.mktemp("toy") / "pipeline", external=True)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory, toy):
    """A home that holds the engines of the ladder's last step, so that only the first is built."""
    home = tmp_path_factory.mktemp("ladder") / "home"
    with new_workers(home) as workers, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "VENDOR", "null")
        patch.setattr(reference, "OPTIONS", {})
        bench = Bench(home, workers)
        bench.builder().build(bench.want(toy), [bench.plan()], no_report)
        yield bench


@pytest.fixture
def bench_for(ladder):
    """Gives the ladder's bench; for a fault that hangs, one whose workers may not take long."""
    with ExitStack() as stack:

        def bench(fault: str) -> Bench:
            if not fault.startswith("hang_on_"):
                return ladder
            stage = fault.removeprefix("hang_on_")
            config = Config(**{f"{stage}_timeout_s": HANG_S})
            home = ladder.store.home
            return Bench(home, stack.enter_context(new_workers(home, config)))

        yield bench


def plans_of(bench, fault, **changes):
    """The null vendor on a card, where it fails in its first component, then on the processor."""
    first = bench.plan(device=GPU, fault=fault, only_component="text_encoder")
    return [replace(first, **changes), bench.plan()]


@pytest.mark.parametrize("fault", FAILURES)
def test_a_failure_takes_the_next_step_once_and_is_remembered(
    fault, ladder, bench_for, toy, monkeypatch
):
    kind, words = FAILURES[fault]
    bench = bench_for(fault)
    plans = plans_of(ladder, fault)
    first = bench.builder().build(bench.want(toy), plans, no_report)
    assert first.plan == plans[1]
    assert first.is_hit
    (step,) = first.steps
    assert (step.vendor, step.device, step.kind) == ("null", GPU.id, kind)
    assert words in step.reason
    assert "not tried again" not in step.reason
    assert bench.leftovers() == []

    monkeypatch.setattr(bench.workers, "fresh", None)  # would fail if it were used
    monkeypatch.setattr(bench.workers, "client", None)
    again = bench.builder().build(bench.want(toy), plans, no_report)
    assert again.plan == plans[1]
    (step,) = again.steps
    assert words in step.reason
    assert "not tried again" in step.reason

    with pytest.raises(DispatchError, match="not tried again") as caught:
        bench.builder(is_strict=True).build(bench.want(toy), plans, no_report)
    assert type(caught.value) is ERROR_KINDS[kind]
    assert caught.value.exit_code == 4
    assert "--retry" in caught.value.hint


@pytest.mark.parametrize("fault", ["compile_error", "load_error", "constant"])
@pytest.mark.parametrize("cleared_by", ["retry", "driver", "runtime"])
def test_what_is_remembered_is_forgotten_when(cleared_by, fault, ladder, toy):
    want = ladder.want(toy)
    plans = plans_of(ladder, fault, options={**plans_of(ladder, fault)[0].options, "target": "x"})
    ladder.builder().build(want, plans, no_report)
    remembered = ladder.builder().build(want, plans, no_report).steps[0]
    assert "not tried again" in remembered.reason
    changed = {
        "retry": plans[0],
        "driver": replace(plans[0], device=replace(GPU, driver="6.15")),
        "runtime": replace(plans[0], runtime="null 99"),
    }[cleared_by]
    tried = ladder.builder(may_retry=cleared_by == "retry").build(
        want, [changed, plans[1]], no_report
    )
    assert FAILURES[fault][1] in tried.steps[0].reason
    assert "not tried again" not in tried.steps[0].reason


def test_a_worker_killed_for_want_of_memory_takes_the_next_step_and_is_tried_again(ladder, toy):
    """The kernel's killer sends what a user's `kill -9` sends: it says nothing of the vendor."""
    plans = plans_of(ladder, "wait_for_cancel")

    def kill(progress: Progress) -> None:
        if "compile" in progress.phase:
            os.kill(ladder.workers.client(SPEC).pid, signal.SIGKILL)

    for _ in range(2):
        result = ladder.builder().build(ladder.want(toy), plans, kill)
        assert result.plan == plans[1]
        assert "signal 9" in result.steps[0].reason
        assert "not tried again" not in result.steps[0].reason


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, toy):
    """Runs a command on a machine with a card and a processor; its code and what it printed."""
    monkeypatch.setattr(api, "detect", lambda: [GPU, replace(CPU, name="Ryzen 9")])
    profile = tmp_path / "faulty.yaml"

    def run(*words: object, fault: str = "none") -> tuple[int, str, str]:
        profile.write_text(
            f"options: {{null: {{fault: {fault}, only_on: discrete, only_component: unet}}}}\n"
        )
        common = ["--home", str(tmp_path / "home"), str(words[0])]
        rest = [*map(str, words[1:]), "--vendor", "null", "--profile", str(profile)]
        monkeypatch.setattr(sys, "argv", ["sdkit-dispatch", *common, *rest])
        with pytest.raises(SystemExit) as ended:
            main()
        streams = capsys.readouterr()
        return ended.value.code, streams.out, streams.err

    return run


def test_a_card_that_computes_wrong_numbers_is_left_for_the_processor_and_all_of_it_is_said(
    command, toy, tmp_path
):
    code, printed, _ = command("build", toy, "--json", fault="drift")
    assert code == 0
    built = json.loads(printed)["build"]
    assert built["plan"]["device"]["id"] == "cpu"
    (step,) = built["steps"]
    assert (step["device"], step["kind"]) == (GPU.id, "NumericError")
    assert "off by" in step["reason"]
    assert {part["verdict"]["status"] for part in built["components"]} == {"passed"}
    assert {part["facts"]["device"] for part in built["components"]} >= {"Ryzen 9"}

    out = tmp_path / "image.png"
    words = ("generate", "a fox", "-p", toy, "--steps", 1, "-o", out)
    code, printed, _ = command(*words, "--json", fault="drift")
    assert code == 0
    result = json.loads(printed)["result"]
    assert result["device"]["id"] == "cpu"
    assert [one["kind"] for one in result["steps"]] == ["NumericError"]
    assert "not tried again" in result["steps"][0]["reason"]
    with Image.open(out) as picture:
        assert json.loads(picture.text["sdkit_dispatch"])["steps"] == result["steps"]

    code, _, said = command("build", toy, fault="drift")
    assert code == 0
    assert f"! null on {GPU.id} did not serve" in said

    code, printed, said = command("build", toy, "--strict", "--json", fault="drift")
    assert code == 4
    assert json.loads(printed)["error"]["kind"] == "NumericError"
    assert "off by" in said

    code, printed, _ = command("build", toy, "--retry", "--json", fault="drift")
    assert code == 0
    (step,) = json.loads(printed)["build"]["steps"]
    assert "off by" in step["reason"]
    assert "not tried again" not in step["reason"]
