"""The whole benchmark on the null vendor, its files, and what plans make of it."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.benchmark import machine
from sdkit_dispatch.benchmark.apply import order_from_report
from sdkit_dispatch.benchmark.charts import component_chart, rate_chart, ratio_chart, rounds_chart
from sdkit_dispatch.benchmark.compare import compare_reports, read_report
from sdkit_dispatch.benchmark.export import csv_text, submission
from sdkit_dispatch.benchmark.machine import Watch, cpu_seconds, remarks_on
from sdkit_dispatch.benchmark.page import FORMS, page
from sdkit_dispatch.benchmark.records import MachineState, Report, Versus, report_to_json
from sdkit_dispatch.benchmark.run import (
    Benchmark,
    Options,
    _labels,
    parse_numbers,
    parse_sizes,
)
from sdkit_dispatch.benchmark.statistics import Ratio
from sdkit_dispatch.benchmark.suites import SUITES, suite_named
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import Device, Plan
from sdkit_dispatch.errors import ConfigError, PipelineError
from sdkit_dispatch.measured_order import (
    MeasuredOrder,
    MeasuredVendor,
    forget_order,
    load_order,
    save_order,
    with_measured_order,
)
from sdkit_dispatch.plan import Decision
from toy_pipeline import make_toy_pipeline

ROUNDS = 3
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
CPU = Device(id="cpu", kind="cpu", maker="amd", name="a processor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_toy_pipeline(tmp_path_factory.mktemp("toy") / "pipeline")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def report(folder, home) -> Report:
    """One vendor that serves, one that does not, and a peer that cannot be had."""
    with Dispatcher(home=home, config=Config(threads=1)) as dispatcher:
        return Benchmark(
            dispatcher=dispatcher,
            pipeline=dispatcher.read(folder),
            choice=Choice(gpu="cpu", must_check=False),
            options=Options(
                vendors=("null", "tensorrt-rtx"),
                peers=("polyblocks",),
                sizes=((32, 16),),
                steps=2,
                rounds=ROUNDS,
                command="sdkit-dispatch bench 'a <b> & c'",
            ),
        ).run()


def test_every_figure_of_a_vendor_is_measured(report):
    (first,) = report.cases
    assert (first.spec.width_px, first.spec.height_px, first.spec.steps) == (32, 16, 2)
    row = next(row for row in first.rows if row.name == "null")
    assert row.failure == ""
    assert set(row.components) == {"text_encoder", "unet", "vae_decoder"}
    for series in [*row.components.values(), row.image]:
        assert len(series.rounds_ms) == ROUNDS
        assert 0 < series.median_ms <= series.p90_ms * 1.5
        assert series.runs >= ROUNDS
        assert series.cpu_ms is not None or sys.platform != "linux"
    assert row.is_rate_measured
    assert row.images_per_minute == pytest.approx(60e3 / row.image.median_ms)
    assert row.built_now is True
    assert row.engine_bytes > 0
    for seconds in (row.build_s, row.warm_load_s, row.first_image_s):
        assert seconds > 0
    assert row.ran["unet"]["device"]
    if sys.platform == "linux":
        assert row.peak_rss_bytes > 1e6
        assert row.cold_load_s > 0
    assert row.device_memory_bytes is None


def test_what_cannot_run_is_a_row_with_its_reason(report):
    rows = {row.name: row for row in report.cases[0].rows}
    assert "serves" in rows["tensorrt-rtx"].failure
    assert "no public package" in rows["polyblocks"].failure
    assert rows["polyblocks"].kind == "peer"
    assert not rows["polyblocks"].components


def test_a_report_survives_json(report, tmp_path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report_to_json(report)))
    assert read_report(file) == report


def test_csv_has_a_line_for_everything_measured(report):
    lines = list(csv.DictReader(csv_text(report).splitlines()))
    row = report.cases[0].rows[0]
    unet = next(line for line in lines if (line["name"], line["what"]) == ("null", "unet"))
    assert float(unet["median_ms"]) == row.components["unet"].median_ms
    image = next(line for line in lines if (line["name"], line["what"]) == ("null", "image"))
    assert float(image["images_per_minute"]) == row.images_per_minute
    assert any(line["name"] == "polyblocks" and line["failure"] for line in lines)


class Cells(HTMLParser):
    """Collects the cells that say which figure they show, the JSON, and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[tuple[str, str, str]] = []
        self.links: list[str] = []
        self.json = ""
        self._at: tuple[str, str] | None = None
        self._in_json = False

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if "data-path" in values:
            self._at = (values["data-path"], values["data-form"])
        self._in_json = tag == "script" and values.get("type") == "application/json"
        self.links += [values[key] for key in ("src", "href") if key in values]

    def handle_endtag(self, tag):
        self._at = None if tag == "td" else self._at
        self._in_json = False

    def handle_data(self, data):
        if self._at is not None:
            self.cells.append((*self._at, data))
        elif self._in_json:
            self.json += data


@pytest.fixture(scope="module")
def html(report) -> str:
    pytest.importorskip("matplotlib", reason="the extra 'report' is not installed")
    case = report.cases[0]
    wider = replace(case, spec=replace(case.spec, width_px=64))
    return page(replace(report, cases=(case, wider)))


def test_figures_of_the_page_are_those_of_its_json(html, report):
    read = Cells()
    read.feed(html)
    document = json.loads(read.json)
    assert document["cases"][0] == json.loads(json.dumps(report_to_json(report)))["cases"][0]
    assert len(read.cells) > 20
    for path, form, text in read.cells:
        value = document
        for part in path.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        assert text == FORMS[form](value), path


def test_the_page_fetches_nothing(html):
    read = Cells()
    read.feed(html)
    assert [link for link in read.links if not link.startswith(("data:", "#"))] == []
    assert "@import" not in html
    assert "url(" not in re.sub(r"url\(#[^)]*\)", "", html)
    assert html.count("<svg") >= 4


@pytest.mark.skipif(not BROWSER, reason="Chromium is not installed")
def test_the_page_opens_in_a_browser_without_a_word_on_its_console(html, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(html, encoding="utf-8")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    offline = ("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}")
    done = subprocess.run(
        [BROWSER, *options, *offline, "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr
    read = Cells()
    read.feed(done.stdout)
    assert len(read.cells) > 20
    assert json.loads(read.json)["schema_version"] == 1


def test_charts_say_which_rows_are_peers(report):
    pytest.importorskip("matplotlib", reason="the extra 'report' is not installed")
    case = report.cases[0]
    ours = next(row for row in case.rows if row.name == "null")
    peer = replace(ours, name="another", kind="peer")
    ratio = Ratio(median=0.5, low=0.4, high=0.6, coverage=0.99, call="faster", rounds=ROUNDS)
    versus = Versus(of="null", other="another", what="unet", ratio=ratio)
    case = replace(case, rows=(ours, peer), versus=(versus,))
    drawings = (
        rate_chart(case.rows),
        component_chart(case.rows, "unet"),
        rounds_chart(case),
        ratio_chart(case),
    )
    for drawing in drawings:
        assert "another (peer)" in drawing
        assert "null (peer)" not in drawing


def test_the_page_says_the_command_and_escapes_it(html):
    assert "&lt;b&gt; &amp; c" in html
    assert "<b> & c" not in html


def test_the_page_is_light_and_dark_and_no_colour_is_left_out(html):
    assert "prefers-color-scheme: dark" in html
    assert "#0a0" not in html  # a placeholder of the charts that became no variable
    used = set(re.findall(r"var\((--\w+)\)", html))
    light, dark = (set(re.findall(r"(--\w+):", block)) for block in html.split(":root")[1:3])
    assert used <= light
    assert {name for name in light if name != "--page"} <= dark | {"--page"}


def test_a_page_of_nothing_but_failures_can_be_made(report):
    pytest.importorskip("matplotlib", reason="the extra 'report' is not installed")
    case = report.cases[0]
    rows = tuple(row for row in case.rows if row.failure)
    assert "no public package" in page(replace(report, cases=(replace(case, rows=rows),)))


def test_a_submission_names_no_user_host_or_path(report, home, folder, monkeypatch):
    import getpass
    import platform

    monkeypatch.setattr(getpass, "getuser", lambda: "ada_lovelace")
    monkeypatch.setattr(platform, "node", lambda: "analytical-engine")
    gpu = replace(CPU, id="uuid:GPU-123-456", kind="discrete", uuid="GPU-123-456")
    row = replace(
        report.cases[0].rows[0],
        failure=f"cannot read {home}/x and /mnt/disk/secret models/ada_lovelace.onnx",
        note=r"C:\Users\ada_lovelace\model.onnx on analytical-engine",
    )
    case = replace(report.cases[0], rows=(row,))
    machine = replace(report.machine, devices=(gpu,))
    private = replace(report, cases=(case,), machine=machine, command=f"bench {folder} --html /q/w")
    text = submission(private, home)
    for word in ("ada_lovelace", "analytical", str(home), str(folder), "/mnt", "GPU-123", "/q/w"):
        assert word not in text, word
    kept = json.loads(text)["cases"][0]["rows"][0]["components"]
    assert (
        kept == json.loads(json.dumps(report_to_json(report)))["cases"][0]["rows"][0]["components"]
    )


def test_reports_are_compared_machine_first(report):
    series = report.cases[0].rows[0].components["unet"]
    slower = replace(series, rounds_ms=tuple(2 * value for value in series.rounds_ms))
    slower = replace(slower, median_ms=2 * series.median_ms)
    row = replace(
        report.cases[0].rows[0], components={"unet": slower}, runtime="null 2", image=None
    )
    case = replace(report.cases[0], rows=(row,))
    other = replace(
        report,
        cases=(case,),
        machine=replace(report.machine, devices=(replace(CPU, name="another processor"),)),
        remarks=("it ran on battery",),
    )
    comparison = compare_reports(report, other)
    assert "another processor" in comparison.differences[0]
    assert any("null 2" in line for line in comparison.differences)
    assert "B: it ran on battery" in comparison.differences
    (line,) = comparison.lines
    assert (line.name, line.what) == ("null", "unet")
    assert line.ratio.median == pytest.approx(0.5)


def test_reports_of_different_suites_are_refused(report):
    with pytest.raises(ConfigError, match="different suites: 'sd15' and 'none'"):
        compare_reports(replace(report, suite="sd15"), report)


def test_reports_without_a_common_case_are_refused(report):
    case = report.cases[0]
    moved = replace(case, spec=replace(case.spec, width_px=8))
    with pytest.raises(ConfigError, match="share no case"):
        compare_reports(report, replace(report, cases=(moved,)))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_a_file_that_is_no_report_is_named(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_report(file)


def test_a_suite_refuses_another_family(folder, home):
    dispatcher = Dispatcher(home=home, config=Config())
    pipeline = dispatcher.read(folder)
    with pytest.raises(PipelineError, match="family 'sdxl'"):
        Benchmark(
            dispatcher=dispatcher,
            pipeline=pipeline,
            choice=Choice(),
            options=Options(suite=SUITES["sdxl"]),
        )


def test_an_unknown_suite_names_the_known_ones():
    with pytest.raises(ConfigError, match="sample, sd15, sdxl"):
        suite_named("sd51")


@pytest.mark.parametrize("text", ["x", "512x", "-1", "5 12,a"])
def test_sizes_that_are_none_are_refused(text):
    if text == "512x":
        assert parse_sizes(text) == ((512, 512),)
        return
    with pytest.raises(ConfigError, match="--sizes"):
        parse_sizes(text)


def test_lists_are_read():
    assert parse_sizes("512, 768x512") == ((512, 512), (768, 512))
    assert parse_numbers("1,2, 4", flag="--batch") == (1, 2, 4)
    with pytest.raises(ConfigError, match="--batch"):
        parse_numbers("0", flag="--batch")


def state(at_s: float, **values) -> MachineState:
    return MachineState(at_s=at_s, **values)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([state(0, others_cpu=0.9), state(1, others_cpu=1.1)], "kept 1.1 of 4 processors busy"),
        ([state(0, governor="performance"), state(1, governor="powersave")], "governor changed"),
        ([state(0, throttles=3), state(1, throttles=5)], "for heat 2 times"),
        ([state(0, frequency_mhz=4000), state(1, frequency_mhz=3000)], "3000 and 4000 MHz"),
        ([state(0, on_battery=False), state(1, on_battery=True)], "plugged"),
        ([state(0, on_battery=True)], "on battery"),
    ],
)
def test_a_machine_that_changes_is_told_of(states, words):
    (remark,) = remarks_on(states, processors=4)
    assert words in remark


def test_a_steady_machine_is_not_mentioned():
    steady = state(0, others_cpu=0.01, frequency_mhz=4000, governor="performance", throttles=7)
    assert remarks_on([steady, steady], processors=4) == []


@pytest.mark.skipif(
    sys.platform != "linux", reason="CPU times of others are read as Linux has them"
)
def test_work_of_others_is_told_from_our_own():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watches = [Watch(list), Watch(lambda: [busy.pid])]
        for watch in watches:
            watch.read()
        begun_s, used_s = time.monotonic(), cpu_seconds(busy.pid)
        while time.monotonic() - begun_s < 0.6 or cpu_seconds(busy.pid) - used_s < 0.2:
            sum(range(1000))
        elapsed_s = time.monotonic() - begun_s
        with_it, without_it = (watch.read().others_cpu for watch in watches)
    finally:
        busy.kill()
        busy.wait()
    assert with_it - without_it > 0.1 / elapsed_s


@pytest.mark.skipif(
    sys.platform != "linux", reason="CPU times of others are read as Linux has them"
)
def test_work_of_a_process_of_ours_that_has_ended_is_not_that_of_others(monkeypatch):
    def alone() -> float:  # a machine on which nobody else works
        times = os.times()
        return 100 + sum(times[:4])

    monkeypatch.setattr(machine, "_busy_s", alone)
    watch = Watch(list)
    watch.read()
    begun_s = time.monotonic()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    while time.monotonic() - begun_s < 0.25:
        sum(range(1000))
    others_cpu = watch.read().others_cpu
    assert others_cpu is not None
    assert others_cpu < 0.1


def plan_of(vendor: str, device: Device = CPU, **values) -> Plan:
    return Plan(
        vendor=vendor, device=device, precision="fp32", runtime=f"{vendor} 1", reasons=("ranked",)
    )


GPU = Device(id="pci:0", kind="discrete", maker="nvidia", name="a GPU", driver="555")


def order(*vendors: str, device: Device = CPU, version: str = "1") -> MeasuredOrder:
    return MeasuredOrder(
        device=device.id,
        name=device.name,
        driver=device.driver,
        vendors=tuple(
            MeasuredVendor(vendor=name, runtime=f"{name} {version}", step_ms=10.0 * (place + 1))
            for place, name in enumerate(vendors)
        ),
        what="sample, 32x32",
        at="2026-11-30T12:00:00+00:00",
    )


def vendors_of(decision: Decision) -> list[str]:
    return [plan.vendor for plan in decision.plans]


def test_a_measured_order_is_preferred_and_says_so():
    decision = Decision(plans=tuple(map(plan_of, ("openvino", "cpu", "ggml"))), rejections=())
    moved = with_measured_order(decision, [order("cpu", "openvino")])
    assert vendors_of(moved) == ["cpu", "openvino", "ggml"]
    assert moved.plans[0].reasons == (
        "measured here on 2026-11-30 (sample, 32x32): 10 ms a UNet step, openvino 20 ms",
        "ranked",
    )
    assert moved.plans[1].reasons == ("ranked",)


def test_a_measured_order_says_nothing_of_other_devices():
    plans = (plan_of("tensorrt", GPU), plan_of("openvino"), plan_of("cpu"))
    moved = with_measured_order(
        Decision(plans=plans, rejections=()), [order("cpu", "openvino", "tensorrt")]
    )
    assert vendors_of(moved) == ["tensorrt", "cpu", "openvino"]


@pytest.mark.parametrize(
    "old",
    [
        order("cpu", "openvino", version="0"),
        replace(order("cpu", "openvino"), driver="another"),
        replace(order("cpu", "openvino"), device="pci:1"),
        replace(order("cpu", "openvino"), name="the processor of another machine"),
    ],
    ids=["another runtime", "another driver", "another device", "another device in its place"],
)
def test_an_order_of_other_versions_is_forgotten(old):
    decision = Decision(plans=tuple(map(plan_of, ("openvino", "cpu"))), rejections=())
    assert with_measured_order(decision, [old]) == decision


def test_orders_are_kept_by_device_and_can_be_forgotten(tmp_path):
    assert load_order(tmp_path) == ()
    save_order(tmp_path, [order("cpu", "ggml"), order("a", "b", device=GPU)])
    save_order(tmp_path, [order("ggml", "cpu")])
    assert {one.device: one.vendors[0].vendor for one in load_order(tmp_path)} == {
        "cpu": "ggml",
        "pci:0": "a",
    }
    assert forget_order(tmp_path)
    assert not forget_order(tmp_path)
    assert load_order(tmp_path) == ()


def test_a_damaged_order_is_none(tmp_path):
    (tmp_path / "measured_order.json").write_text("[{]")
    assert load_order(tmp_path) == ()


def test_an_order_comes_from_two_vendors_on_one_device(report):
    with pytest.raises(ConfigError, match="fewer than two vendors were tried"):
        order_from_report(report)
    case = report.cases[0]
    row = case.rows[0]
    series = replace(row.components["unet"], median_ms=row.components["unet"].median_ms / 2)
    other = replace(row, name="swift", vendor="swift", components={"unet": series})
    (found,) = order_from_report(replace(report, cases=(replace(case, rows=(row, other)),)))
    assert [one.vendor for one in found.vendors] == ["swift", "null"]
    assert found.device == "cpu"


def test_a_vendor_on_two_devices_is_two_rows_with_timings_of_their_own(
    folder, tmp_path, monkeypatch
):
    with Dispatcher(home=tmp_path, config=Config(threads=1)) as dispatcher:
        devices = [GPU, *dispatcher.devices]
        monkeypatch.setattr(Dispatcher, "devices", property(lambda _: devices))
        options = Options(
            vendors=("null",), sizes=((32, 16),), steps=2, rounds=ROUNDS, image_rounds=0
        )
        report = Benchmark(
            dispatcher=dispatcher,
            pipeline=dispatcher.read(folder),
            choice=Choice(must_check=False),
            options=options,
        ).run()
    rows = [row for row in report.cases[0].rows if row.components]
    assert [row.name for row in rows] == ["null on discrete", "null on cpu"]
    assert [row.vendor for row in rows] == ["null", "null"]
    assert [row.device for row in rows] == ["pci:0", "cpu"]
    # The clock has a nanosecond: the same three medians are the same timings.
    first, second = (row.components["unet"].rounds_ms for row in rows)
    assert first != second


def test_rows_of_one_vendor_have_names_of_their_own():
    plans = [plan_of("a", GPU), plan_of("a", replace(GPU, id="pci:1")), plan_of("a"), plan_of("b")]
    assert _labels(plans) == ["a on discrete", "a on discrete 2", "a on cpu", "b"]


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is a signal on POSIX")
@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM"])
def test_being_stopped_keeps_what_was_measured(stop, folder, tmp_path):
    file = tmp_path / "cut.json"
    command = [
        *(sys.executable, "-m", "sdkit_dispatch", "--home", str(tmp_path / "home")),
        *("bench", str(folder), "--vendors", "null", "--rounds", "100000"),
        *("--gpu", "cpu", "--json-file", str(file)),
    ]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A shell's background job ignores it, and so would what is started here.
        preexec_fn=lambda: signal.signal(getattr(signal, stop), signal.SIG_DFL),
    ) as run:
        for line in run.stderr:
            if "left" in line:  # a round is over
                run.send_signal(getattr(signal, stop))
                break
        run.communicate(timeout=60)
    assert run.returncode == 130
    cut = read_report(file)
    assert "16x16" in cut.interrupted
    assert cut.cases[0].rows[0].components["unet"].median_ms > 0
