"""Peers in processes of their own, and entrants that fail, drift or idle: no runtime needed."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.benchmark.entrants import Image
from sdkit_dispatch.benchmark.machine import Watch
from sdkit_dispatch.benchmark.measure import CaseMeasurement, Settings
from sdkit_dispatch.benchmark.peer_checkpoint import checkpoint_for
from sdkit_dispatch.benchmark.peers import PEERS, SCRIPTS, PeerEntrant, PeerProcess
from sdkit_dispatch.benchmark.records import CaseSpec, Row
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.contract import GenerateRequest, no_report
from sdkit_dispatch.errors import DispatchError, PipelineError, RunError, WorkerError
from sdkit_dispatch.pipeline_files import read_pipeline
from sdkit_dispatch.wanted import wanted
from sdkit_dispatch.worker_client import Timing
from toy_bench import REQUEST
from toy_pipeline import make_toy_pipeline

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from peer_lines import serve

class MockPeer:
    def __init__(self, job):
        self.job = job
    def prepare(self):
        print("a library talks on stdout")
        return {{"runtime": "mock 1", "components": ["unet"], "images": True}}
    def open(self, use):
        if use == "images":
            raise ValueError("no such sampler")
        return {{"unet": {{"device": "cpu"}}}}
    def compute(self, component, feeds):
        return {{"y": feeds["x"] * 2}}
    def image(self):
        import os
        os.write(2, b"some library: bad instruction")
        os._exit(9)

serve(MockPeer)
"""


@pytest.fixture
def process(tmp_path):
    import numpy as np

    script = tmp_path / "mock_peer.py"
    script.write_text(SCRIPT.format(folder=str(SCRIPTS)))
    feeds = tmp_path / "feeds.npz"
    np.savez(feeds, x=np.ones(3))
    job = {"work": str(tmp_path), "threads": 1, "components": {"unet": {"feeds": str(feeds)}}}
    running = PeerProcess("mock", Path(sys.executable), script, job)
    yield running
    running.close()
    running.close()


def test_a_peer_answers_whatever_its_libraries_print(process, tmp_path):
    import numpy as np

    assert process.ask("prepare")["runtime"] == "mock 1"
    assert process.ask("open", use="components")["ran"]["unet"]["device"] == "cpu"
    timing = process.ask("run", component="unet", runs=3)
    assert len(timing["wall_s"]) == len(timing["cpu_s"]) == 3
    outputs = tmp_path / "outputs.npz"
    process.ask(
        "compute", component="unet", feeds=str(tmp_path / "feeds.npz"), outputs=str(outputs)
    )
    assert np.load(outputs)["y"].tolist() == [2.0, 2.0, 2.0]


def test_what_a_peer_cannot_do_is_said_in_its_own_words(process):
    with pytest.raises(RunError, match="ValueError: no such sampler"):
        process.ask("open", use="images")
    assert process.ask("prepare")["images"]  # and it lives on


def test_a_peer_that_dies_leaves_its_last_words(process):
    with pytest.raises(WorkerError, match=r"exit code 9(.|\n)*bad instruction"):
        process.ask("image")


def test_every_peer_has_a_script_or_a_reason():
    for peer in PEERS.values():
        assert bool(peer.absent) != (SCRIPTS / f"{peer.script}.py").is_file(), peer.name
        assert peer.absent or (peer.extra and peer.packages), peer.name


def test_peer_scripts_import_nothing_of_ours():
    for script in SCRIPTS.glob("*.py"):
        text = script.read_text(encoding="utf-8")
        assert "import sdkit" not in text
        assert "from sdkit" not in text


class MockEntrant:
    """Takes a second of pretended time for each run; a mock, because its times must be known."""

    def __init__(self, name: str, step_s: float, *, fails_at: int | None = None) -> None:
        self.row = Row(name=name, kind="vendor")
        self.components = ("unet",)
        self.makes_images = True
        self.calls: list[str] = []
        self.open_use = ""
        self._step_s = step_s
        self._fails_at = fails_at

    def prepare(self) -> None:
        self.row = replace(self.row, build_s=1.0)

    def forget_files(self) -> bool:
        return True

    def open(self, use) -> None:
        self.calls.append(f"open {use}")
        self.open_use = use

    def run(self, component: str, runs: int) -> Timing:
        assert self.open_use == "components"
        self.calls.append("run")
        if self._fails_at is not None and self.calls.count("run") > self._fails_at:
            raise RunError("the device is lost", "try another")
        return Timing(wall_s=(self._step_s,) * runs, cpu_s=(self._step_s,) * runs)

    def image(self) -> Image:
        assert self.open_use == "images"
        self.calls.append("image")
        return Image(wall_s=10 * self._step_s, cpu_s=None, pixels=None)

    def pid(self) -> int | None:
        return None

    def close(self) -> None:
        self.open_use = ""


def measured(*entrants: MockEntrant, **settings):
    request = GenerateRequest(prompt="x", width_px=8, height_px=8, steps=2)
    spec = CaseSpec(
        width_px=8,
        height_px=8,
        batch=1,
        steps=2,
        guidance=7.0,
        scheduler="ddim",
        seed=0,
        prompt="x",
        images=settings.pop("images", True),
    )
    measurement = CaseMeasurement(
        entrants,
        spec=spec,
        request=request,
        settings=Settings(rounds=9, **settings),
        watch=Watch(list),
        report=no_report,
    )
    measurement.run()
    return measurement.result()


@pytest.mark.parametrize("is_resident", [True, False])
def test_known_times_give_the_known_figures(is_resident):
    case = measured(MockEntrant("a", 0.010), MockEntrant("b", 0.020), is_resident=is_resident)
    a, b = case.rows
    assert a.components["unet"].median_ms == pytest.approx(10)
    assert a.components["unet"].p90_ms == pytest.approx(10)
    assert b.components["unet"].cpu_ms == pytest.approx(20)
    assert len(a.components["unet"].rounds_ms) == 9
    assert a.image.median_ms == pytest.approx(100)
    assert (a.images_per_minute, a.is_rate_measured) == (pytest.approx(600), True)
    ratios = {one.what: one for one in case.versus}
    assert ratios["unet"].ratio.median == pytest.approx(0.5)
    assert ratios["unet"].ratio.call == "faster"
    assert ratios["unet"].cpu_ratio.median == pytest.approx(0.5)


def test_entrants_take_turns_there_and_back():
    order: list[str] = []

    class Watched(MockEntrant):
        def run(self, component, runs):
            order.append(self.row.name)
            return super().run(component, runs)

    measured(Watched("a", 0.5), Watched("b", 0.5), Watched("c", 0.5), images=False)
    turns = "".join(order)
    assert turns.startswith("abc")  # the warm-up
    assert turns[3:] == "abccba" * 4 + "abc"


def test_one_that_fails_is_a_row_with_what_it_has_and_the_others_go_on():
    case = measured(MockEntrant("weak", 0.5, fails_at=4), MockEntrant("b", 0.5))
    weak, b = case.rows
    assert weak.failure == "the device is lost"
    assert weak.hint == "try another"
    assert len(weak.components["unet"].rounds_ms) == 3  # the first run was the warm-up
    assert len(b.components["unet"].rounds_ms) == 9
    assert b.failure == ""


def test_only_one_is_loaded_at_a_time_where_memory_is_short():
    loaded: set[str] = set()

    class Big(MockEntrant):
        def open(self, use):
            super().open(use)
            loaded.add(self.row.name)
            assert len(loaded) == 1

        def close(self):
            super().close()
            loaded.discard(self.row.name)

    case = measured(Big("a", 0.5), Big("b", 0.5), is_resident=False, images=False)
    assert [len(row.components["unet"].rounds_ms) for row in case.rows] == [9, 9]


def test_first_runs_of_a_process_are_not_measured():
    class Mapped(MockEntrant):
        """A mock of an engine that reads its weights from the disk in its first two runs."""

        def open(self, use):
            super().open(use)
            self._since_open = 0

        def run(self, component, runs):
            slow = [3.0, 1.5][self._since_open : self._since_open + runs]
            self._since_open += runs
            timing = super().run(component, runs)
            return Timing(wall_s=(*slow, *timing.wall_s[len(slow) :]), cpu_s=timing.cpu_s)

    one = Mapped("a", 1.0)
    case = measured(one, is_resident=False, images=False)
    assert set(case.rows[0].components["unet"].rounds_ms) == {1000}
    # Of a steady one the second run tells.
    steady = MockEntrant("b", 1.0)
    measured(steady, is_resident=False, images=False)
    assert steady.calls.count("run") == 9 * 3


def test_images_that_take_too_long_are_computed_and_said_so():
    one = MockEntrant("a", 0.5)
    one.components = ("text_encoder", "unet", "vae_decoder")
    case = measured(one, image_rounds=0)
    (row,) = case.rows
    assert not row.is_rate_measured
    # 2 prompts, 2 steps, 1 decoding of half a second
    assert row.images_per_minute == pytest.approx(60 / 2.5)
    assert "computed" in case.remarks[0]


def test_peers_work_in_the_temporary_home_where_the_own_cannot_be_written(tmp_path):
    pipeline = read_pipeline(make_toy_pipeline(tmp_path / "pipeline"))
    with Dispatcher(home=tmp_path / "home") as dispatcher:
        dispatcher.store.retreat("a test says so")
        entrant = PeerEntrant(
            dispatcher=dispatcher,
            choice=Choice(),
            peer=PEERS["jax-xla"],
            python=tmp_path / "no-python",
            want=wanted(pipeline, REQUEST, token_chunks=1, memo=dispatcher.store.memo),
        )
        with pytest.raises(DispatchError):
            entrant.prepare()
        assert list((dispatcher.store.home / "scratch" / "peers").iterdir())
    assert not (tmp_path / "home" / "scratch" / "peers").exists()


def checkpoint_of(path: Path, weights: int) -> Path:
    """Writes a sound checkpoint whose UNet has so many weights, all of them a hole in the file."""
    name = "model.diffusion_model.out.2.weight"
    entry = {"dtype": "F16", "shape": [weights], "data_offsets": [0, 2 * weights]}
    header = json.dumps({name: entry}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * weights)
    return path


@pytest.fixture
def pipeline(tmp_path):
    return read_pipeline(make_toy_pipeline(tmp_path / "pipeline"))


@pytest.fixture
def weights(pipeline) -> int:
    """Of its UNet, as its files have them."""
    return pipeline.components["unet"].weights_bytes // 4


def test_without_a_checkpoint_the_reason_is_told_and_what_to_give(pipeline):
    no = checkpoint_for("stable-diffusion.cpp", pipeline, None)
    assert "whole checkpoints" in no.reason
    assert "--checkpoint FILE.safetensors" in no.hint


def test_the_only_checkpoint_in_the_folder_is_taken(pipeline, weights):
    lying = checkpoint_of(pipeline.folder / "all.safetensors", weights)
    assert checkpoint_for("a peer", pipeline, None) == lying
    checkpoint_of(pipeline.folder / "other.safetensors", weights)
    assert "several: all.safetensors, other.safetensors" in (
        checkpoint_for("a peer", pipeline, None).reason
    )


def test_a_checkpoint_of_another_network_is_refused(pipeline, weights, tmp_path):
    given = checkpoint_of(tmp_path / "other.safetensors", 3 * weights)
    no = checkpoint_for("a peer", pipeline, given)
    assert "'other.safetensors' is of another network" in no.reason


def test_a_given_file_that_is_no_checkpoint_is_an_error(pipeline, tmp_path):
    given = tmp_path / "words.safetensors"
    given.write_text("these are words")
    with pytest.raises(PipelineError, match="neither"):
        checkpoint_for("a peer", pipeline, given)


def test_a_peer_that_times_itself_is_believed(tmp_path):
    script = tmp_path / "mock_timer.py"
    script.write_text(
        SCRIPT.format(folder=str(SCRIPTS)).replace(
            "    def image(self):",
            "    def timed(self, component, runs):\n        return [2.0] * runs, [3.0] * runs\n"
            "    def image(self):",
        )
    )
    process = PeerProcess("mock", Path(sys.executable), script, {"work": "", "threads": 1})
    try:
        assert process.ask("run", component="unet", runs=2) == {
            "wall_s": [2.0, 2.0],
            "cpu_s": [3.0, 3.0],
        }
    finally:
        process.close()
