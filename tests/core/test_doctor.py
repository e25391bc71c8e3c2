"""Examinations with the null vendor; whether a real one computes rightly is in tests/vendors."""

import getpass
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sdkit_dispatch import doctor_picture, reference
from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.bug_report import bug_report, redacted
from sdkit_dispatch.contract import Device
from sdkit_dispatch.doctor import examine
from sdkit_dispatch.errors import ConfigError
from sdkit_null import SPEC
from toy_pipeline import make_toy_pipeline

GPU = Device(id="pci:0000:01:00.0", kind="discrete", maker="nvidia", name="A card", arch="sm_89")
CPU = Device(id="cpu", kind="cpu", maker="intel", name="A processor")


@pytest.fixture
def dispatcher(tmp_path):
    with Dispatcher(home=tmp_path / "home") as running:
        running.specs = running.workers.specs = {"null": SPEC}
        running._devices = [GPU, CPU]
        yield running


def sabotaged(dispatcher: Dispatcher, adapter: str, tmp_path: Path, monkeypatch) -> None:
    """Replaces the adapter by one of a package that is written here."""
    package = tmp_path / "sdkit_saboteur"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "adapter.py").write_text(
        "import os, threading\nfrom sdkit_null.adapter import NullAdapter\n" + adapter
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    spec = replace(SPEC, adapter="sdkit_saboteur.adapter:Saboteur")
    dispatcher.specs = dispatcher.workers.specs = {"null": spec}
    dispatcher._devices = [CPU]


def test_a_healthy_vendor_is_ok_on_every_device_with_error_and_times(dispatcher):
    findings = examine(dispatcher, vendor="null")
    assert [(one.device, one.status) for one in findings] == [(GPU.id, "ok"), ("cpu", "ok")]
    for finding in findings:
        assert finding.error < 1e-6
        assert finding.run_ms > 0
        assert finding.compile_s >= 0
        assert finding.reasons, "what the vendor says of its choice"


def test_one_device_can_be_chosen(dispatcher):
    (finding,) = examine(dispatcher, gpu="gpu:0", vendor="null")
    assert finding.device == GPU.id
    with pytest.raises(ConfigError):
        examine(dispatcher, gpu="gpu:1", vendor="null")
    with pytest.raises(ConfigError):
        examine(dispatcher, vendor="nil")


def test_a_path_is_proven_by_a_picture_that_is_compared(dispatcher, tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "VENDOR", "null")
    monkeypatch.setattr(reference, "OPTIONS", {})
    monkeypatch.setattr(doctor_picture, "REFERENCE_VENDOR", "null")
    pipeline = str(make_toy_pipeline(tmp_path / "pipeline"))
    (finding,) = examine(dispatcher, gpu="gpu:0", vendor="null", pipeline=pipeline)
    assert (finding.device, finding.status) == (GPU.id, "ok"), finding.message
    picture = finding.picture
    assert (picture.difference, picture.was_stored, picture.ran_on) == (0.0, False, "A card")
    assert set(picture.verdicts.values()) == {"passed"}
    assert "first picture in" in finding.message
    assert "0.00 of 255 levels" in finding.message


def test_a_picture_that_is_another_one_is_a_failed_finding(dispatcher, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_picture, "_difference", lambda *_: 20.0)
    pipeline = str(make_toy_pipeline(tmp_path / "pipeline"))
    (finding,) = examine(dispatcher, gpu="gpu:0", vendor="null", pipeline=pipeline)
    assert finding.status == "failed"
    assert "20.00 of 255" in finding.message


def test_a_vendor_that_computes_but_does_not_draw_is_a_failed_finding(
    dispatcher, tmp_path, monkeypatch
):
    body = (
        "def load(self, engine, device):\n"
        "        if engine.request.component == 'unet': os.abort()\n"
        "        return super().load(engine, device)"
    )
    sabotaged(dispatcher, f"class Saboteur(NullAdapter):\n    {body}\n", tmp_path, monkeypatch)
    pipeline = str(make_toy_pipeline(tmp_path / "pipeline"))
    (finding,) = examine(dispatcher, vendor="null", pipeline=pipeline)
    assert finding.status == "failed"
    assert "but it does not draw: the null worker died in 'load'" in finding.message


def test_a_vendor_without_a_rank_is_examined_only_when_it_is_named(dispatcher):
    assert examine(dispatcher) == []


SABOTAGE = {
    "crashes": ("def load(self, engine, device): os.abort()", "died in 'load'"),
    "hangs": ("def load(self, engine, device): threading.Event().wait()", "took longer than"),
    "computes wrongly": (
        "def load(self, engine, device):\n"
        "        session = super().load(engine, device)\n"
        "        run = session.run\n"
        "        session.run = lambda feeds: {k: v * 1.1 for k, v in run(feeds).items()}\n"
        "        return session",
        "more than",
    ),
    "computes NaN": (
        "def load(self, engine, device):\n"
        "        session = super().load(engine, device)\n"
        "        run = session.run\n"
        "        session.run = lambda feeds: {k: v * float('nan') for k, v in run(feeds).items()}\n"
        "        return session",
        "",
    ),
}


@pytest.mark.parametrize("sin", SABOTAGE)
def test_a_vendor_that(sin, dispatcher, tmp_path, monkeypatch):
    """... crashes, hangs or computes wrongly is a failed finding, and the others are examined."""
    body, words = SABOTAGE[sin]
    sabotaged(dispatcher, f"class Saboteur(NullAdapter):\n    {body}\n", tmp_path, monkeypatch)
    if sin == "hangs":  # only then: a busy machine takes that long to start a worker
        monkeypatch.setattr("sdkit_dispatch.doctor.LIMIT_S", 1.5)
    findings = examine(dispatcher, vendor="null")
    assert [one.status for one in findings] == ["failed"]
    assert words in findings[0].message
    assert findings[0].hint


def test_a_report_holds_what_helps_and_no_name_or_folder(dispatcher, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane.doe")
    monkeypatch.setenv("SDKIT_DISPATCH_LOG_LEVEL", "debug")
    monkeypatch.setattr(getpass, "getuser", lambda: "jane.doe")
    monkeypatch.setattr("platform.node", lambda: "janes-pc")
    text = bug_report(dispatcher, examine(dispatcher, vendor="null"))
    for title in ("sdkit-dispatch", "plan", "vendors", "doctor", "failures", "store", "settings"):
        assert f"== {title}\n" in text
    assert "A card" in text
    assert '"SDKIT_DISPATCH_LOG_LEVEL": "debug"' in text
    for secret in ("jane", str(dispatcher.home), str(Path(__file__).parents[2])):
        assert secret not in text


def test_words_are_removed_as_json_writes_them_too():
    words = {r"C:\Users\Jané": "<home>", "Jané": "<user>"}
    text = json.dumps({"path": r"C:\Users\Jané\models", "other": "C:/Users/Jané/x"})
    assert redacted(text, words) == '{"path": "<home>\\\\models", "other": "<home>/x"}'


def test_the_command_writes_the_report_and_its_exit_code_tells(tmp_path):
    command = [sys.executable, "-m", "sdkit_dispatch", "--home", str(tmp_path / "home"), "doctor"]
    report = tmp_path / "report.txt"
    done = subprocess.run(
        [*command, "--vendor", "null", "--report", str(report)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok ")
    assert "== doctor" in report.read_text(encoding="utf-8")
    done = subprocess.run([*command, "--vendor", "nil"], capture_output=True, text=True)
    assert done.returncode == 2
