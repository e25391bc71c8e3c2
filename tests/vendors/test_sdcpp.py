"""stable-diffusion.cpp with real checkpoints: of zeros everywhere, of random weights by night.

The library's networks are of full size whatever the checkpoint; a picture of 64 x 64 pixels is the
least that it draws.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sdkit_dispatch.api import Dispatcher
from sdkit_dispatch.choice import Choice
from sdkit_dispatch.config import Config
from sdkit_dispatch.contract import SCHEDULERS, Device, GenerateRequest, Rejection, no_report
from sdkit_dispatch.diffusion.noise import MAX_SEED
from sdkit_dispatch.errors import ConfigError, PipelineError, RunError
from sdkit_sdcpp import SPEC
from sdkit_sdcpp.adapter import SdcppAdapter
from sdkit_sdcpp.gpus import index_of, names_from_log
from sdkit_sdcpp.library import LibraryLog
from sdkit_sdcpp.names import SCHEDULERS as THEIRS
from sdkit_sdcpp.session import SdcppSession

sys.path.append(str(Path(__file__).parents[1] / "models"))
import seeded_checkpoint

CHOICE = Choice(vendor="sdcpp", gpu="cpu")
SIDE = {"width_px": 64, "height_px": 64}
VARIABLE = "SDKIT_FULL_SIZE_CHECKPOINT"
COLOUR = (255, 0, 128)
"""Of a decoder of zeros whose last bias is 1, -1, 0: the library maps -1..1 to 0..255."""
ROUNDING = 1

VULKAN_LOG = """\
load_backend: loaded CPU backend from libggml-cpu.so
ggml_vulkan: Found 2 Vulkan devices:
ggml_vulkan: 0 = Intel(R) UHD Graphics 770 (ADL-S GT1) (Intel open-source Mesa driver) | uma: 1 | fp16: 1
ggml_vulkan: 1 = NVIDIA GeForce RTX 4090 (NVIDIA) | uma: 0 | fp16: 1 | warp size: 32
"""  # noqa: E501 - as it is printed


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory):
    for package in SPEC.runtime_packages:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package}, the runtime of sdcpp, is not installed")
    config = Config(env="current", threads=1)
    with Dispatcher(home=tmp_path_factory.mktemp("home"), config=config) as running:
        yield running


@pytest.fixture(scope="module")
def drawn(dispatcher, blank):
    """The answer, and the progress on the way to it."""
    seen = []
    loaded = dispatcher.load(blank, CHOICE)
    loaded.report = seen.append
    answer = loaded.generate("a fox", steps=2, guidance=1, seed=3, **SIDE)
    return answer, seen


def test_a_decoder_of_zeros_draws_its_bias(drawn):
    images = drawn[0].images
    assert images.shape == (1, 64, 64, 3)
    assert np.abs(images.astype(int) - COLOUR).max() <= ROUNDING


def test_facts_are_what_the_library_says(drawn):
    facts = drawn[0].denoiser
    assert facts["backend"] == "CPU"
    assert facts["precision"] == "fp16"
    assert facts["weights"] == "f16: 686"
    assert facts["runtime"].startswith("stable-diffusion.cpp of cyllama")


class RecordingContextMock:
    """Draws nothing, and keeps what it was asked to draw."""

    def generate(self, **values):
        self.values = values
        return []


class BindingMock:
    """The names of the binding, and nothing behind them."""

    class SampleMethod:
        DPMPP2M = "a method"

    class Scheduler:
        DISCRETE = "a scheduler"

    @staticmethod
    def set_progress_callback(callback):
        pass


def test_the_largest_seed_reaches_the_library_as_it_is():
    context = RecordingContextMock()
    session = SdcppSession(context, BindingMock, log=LibraryLog(), facts={})
    request = GenerateRequest(prompt="a fox", **SIDE, seed=MAX_SEED)
    with pytest.raises(ValueError, match="at least one array"):  # it drew nothing
        session.generate(request, no_report)
    assert context.values["seed"] == MAX_SEED


@pytest.mark.parametrize("kind", ["cpu", "discrete"])
def test_a_library_that_does_not_start_is_a_run_error(monkeypatch, tmp_path, kind):
    def run(command, **options):
        return subprocess.CompletedProcess(command, -6, "", "the library ends it")

    monkeypatch.setattr(subprocess, "run", run)
    device = Device(id="one", kind=kind, maker="amd", name="a device")
    with pytest.raises(RunError, match="does not start: it ended with -6: the library ends it"):
        SdcppAdapter().load(tmp_path / "model.safetensors", device, options={})


def test_each_step_is_reported(drawn):
    done = [one.fraction for one in drawn[1] if one.phase == "denoise"]
    assert done == [0.0, 0.5, 1.0]


def test_sizes_that_the_library_would_round_are_refused(dispatcher, blank, drawn):
    with pytest.raises(ConfigError, match="multiples of 64") as caught:
        dispatcher.load(blank, CHOICE).generate("a fox", width_px=72, height_px=64)
    assert caught.value.hint == "give --width 128"


@pytest.mark.parametrize("names", [["a"], ["model.diffusion_model.input_blocks.0.0.weight"]])
def test_a_sound_file_of_another_kind_is_a_pipeline_error(dispatcher, tmp_path, names):
    shape = (320, 4, 3, 3)
    path = tmp_path / "other.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeded_checkpoint, "sd15", lambda: ((name, shape) for name in names))
        seeded_checkpoint.write_blank(path, {})
    with pytest.raises(PipelineError, match="does not take"):
        dispatcher.load(path, CHOICE).generate("a fox", steps=1, **SIDE)


def test_a_gpu_that_vulkan_does_not_show_is_refused_and_never_the_cpu_instead(dispatcher):
    ghost = Device(id="pci:0000:01:00.0", kind="discrete", maker="nvidia", name="a ghost")
    answer = dispatcher.workers.client(SPEC).probe(ghost)
    assert isinstance(answer, Rejection)
    assert answer.code == "no-such-gpu"
    assert "a ghost" in answer.reason


def test_a_vulkan_driver_that_ends_the_process_does_not_cost_the_processor(monkeypatch):
    real = subprocess.run

    def run(command, **options):
        if (options.get("env") or os.environ).get("GGML_VK_VISIBLE_DEVICES") != "":
            return subprocess.CompletedProcess(command, -6, "", "the driver ends it")
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    cpu = Device(id="cpu", kind="cpu", maker="amd", name="a processor")
    assert isinstance(SdcppAdapter().probe(cpu), str)


def test_every_scheduler_of_ours_has_a_name_there():
    assert set(THEIRS) == set(SCHEDULERS)


def test_the_binding_has_every_name(dispatcher):
    import cyllama.sd.stable_diffusion as sd

    for method, scheduler in THEIRS.values():
        assert hasattr(sd.SampleMethod, method)
        assert hasattr(sd.Scheduler, scheduler)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("NVIDIA GeForce RTX 4090", 1),
        ("GeForce RTX 4090", 1),
        ("Intel(R) UHD Graphics 770", 0),
        ("UHD 770", 0),
        ("NVIDIA GeForce RTX 4080", None),
        ("", None),
    ],
)
def test_a_gpu_is_found_by_its_name_among_those_that_the_library_lists(name, wanted):
    gpus = names_from_log(VULKAN_LOG)
    assert gpus == ("Intel(R) UHD Graphics 770 (ADL-S GT1)", "NVIDIA GeForce RTX 4090")
    device = Device(id="gpu", kind="discrete", maker="", name=name)
    assert index_of(device, gpus) == wanted


@pytest.mark.parametrize(
    ("name", "gpus", "wanted"),
    [
        ("NVIDIA GeForce RTX 4080", ("GeForce RTX 4080 SUPER",), None),
        ("NVIDIA GeForce RTX 3070 Ti", ("GeForce RTX 3070",), None),
        ("AMD Radeon RX 7900 XT", ("AMD Radeon RX 7900 XTX (RADV NAVI31)",), None),
        ("AMD Radeon RX 7900 XTX", ("AMD Radeon RX 7900 XTX (RADV NAVI31)",), 0),
        ("NVIDIA GeForce RTX 3070", ("GeForce RTX 3070", "GeForce RTX 3070 Ti"), 0),
        ("NVIDIA GeForce RTX 3070 Ti", ("GeForce RTX 3070", "GeForce RTX 3070 Ti"), 1),
    ],
)
def test_a_model_is_not_taken_for_another_whose_name_begins_like_it(name, gpus, wanted):
    device = Device(id="gpu", kind="discrete", maker="", name=name)
    assert index_of(device, gpus) == wanted


def test_two_gpus_of_one_name_are_no_choice():
    device = Device(id="gpu", kind="discrete", maker="", name="NVIDIA GeForce RTX 4090")
    assert index_of(device, ("NVIDIA GeForce RTX 4090",) * 2) is None


def test_the_log_tells_the_device_that_is_really_used():
    log = LibraryLog()
    log(0, "ggml_extend_backend.cpp:291  - Initializing backend: Vulkan0\n")
    assert log.backend == "Vulkan0"
    log(2, "ggml_extend_backend.cpp:350  - device Vulkan0 failed to init\n")
    log(0, "ggml_extend_backend.cpp:356  - Using CPU backend\n")
    assert log.backend == "CPU"
    assert log.last_words == "device Vulkan0 failed to init"


@pytest.mark.nightly
def test_random_weights_of_full_size_draw_noise_that_its_seed_decides(dispatcher):
    """SDKIT_FULL_SIZE_CHECKPOINT names what seeded_checkpoint.py wrote."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        pytest.skip(f"{VARIABLE} does not name a checkpoint")
    loaded = dispatcher.load(path, CHOICE)
    values = {"steps": 2, "seed": 1, **SIDE}
    first, again = (loaded.generate("a fox", **values).images for _ in range(2))
    other = loaded.generate("a fox", **{**values, "seed": 2}).images
    assert (first == again).all()
    assert (first != other).mean() > 0.1
    assert first.std() > 1  # neither flat nor what NaN becomes
