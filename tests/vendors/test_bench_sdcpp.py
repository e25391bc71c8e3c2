"""stable-diffusion.cpp as a peer of the benchmark: it tells its steps and its decoding apart."""

import importlib.util
import sys
from pathlib import Path

import pytest

from sdkit_dispatch.benchmark.peers import SCRIPTS, PeerProcess
from sdkit_dispatch.errors import RunError

sys.path.append(str(Path(__file__).parents[1] / "models"))
import seeded_checkpoint

SCRIPT = SCRIPTS / "sdcpp_checkpoint.py"
STEPS = 2


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    if importlib.util.find_spec("cyllama") is None:
        pytest.skip("cyllama-vulkan, the binding of stable-diffusion.cpp, is not installed")
    work = tmp_path_factory.mktemp("peer")

    def start(checkpoint: Path, **request) -> PeerProcess:
        known = {
            "prompt": "a fox",
            "negative_prompt": "",
            "width_px": 64,
            "height_px": 64,
            "steps": STEPS,
            "guidance": 1.0,
            "seed": 3,
            "batch": 1,
            "scheduler": "ddim",
        }
        job = {
            "work": str(work),
            "checkpoint": str(checkpoint),
            "threads": 1,
            "components": {},
            "request": {**known, **request},
        }
        return PeerProcess("stable-diffusion.cpp", Path(sys.executable), SCRIPT, job)

    return start


def test_steps_decodings_and_images_are_timed_each_by_itself(start, blank):
    process = start(blank)
    try:
        told = process.ask("prepare")
        assert told["components"] == ["unet", "vae_decoder"]
        assert told["runtime"].startswith("stable-diffusion.cpp of cyllama 0.")
        assert process.ask("open", use="components")["ran"]["unet"]["device"] == "CPU"
        unet = process.ask("run", component="unet", runs=1)
        decoding = process.ask("run", component="vae_decoder", runs=1)
        image = process.ask("image")
    finally:
        process.close()
    assert len(unet["wall_s"]) == len(decoding["wall_s"]) == 1
    assert image["pixels"] is None
    parts_s = STEPS * min(unet["cpu_s"]) + min(decoding["cpu_s"])
    # The rest of an image is its text encoder; a machine that is busy with others adds its noise.
    assert 0.5 * parts_s < image["cpu_s"] < 3 * parts_s


def test_a_size_that_it_would_round_up_is_refused(start, blank):
    process = start(blank, width_px=32)
    try:
        with pytest.raises(RunError, match="width_px is 32; it draws multiples of 64"):
            process.ask("prepare")
    finally:
        process.close()


def test_a_network_that_it_does_not_know_is_refused_in_its_own_words(start, tmp_path):
    path = tmp_path / "other.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeded_checkpoint, "sd15", lambda: iter([("a", (320, 4, 3, 3))]))
        seeded_checkpoint.write_blank(path, {})
    process = start(path)
    try:
        with pytest.raises(RunError, match=r"(?i)sd version|model"):
            process.ask("open", use="images")
    finally:
        process.close()
