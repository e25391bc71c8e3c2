"""stable-diffusion.cpp through cyllama: a whole checkpoint, told apart by its callbacks and log.

It runs no component by itself. A step is what lies between two calls of its progress callback (both
passes of guidance), decoding what lies between two lines of its log.
"""

import os
import re
import time
from typing import Any

from peer_lines import serve, threads_of

SCHEDULERS = {
    "ddim": ("DDIM_TRAILING", "SIMPLE"),
    "euler": ("EULER", "DISCRETE"),
    "euler_a": ("EULER_A", "DISCRETE"),
}
SIDE_STEP_PX = 64
"""It rounds other widths and heights up, and would draw a larger picture than the others."""
DECODED, SAMPLED = "decode_first_stage completed", "sampling completed"
LAST_WORDS = 3
WARNING = 2


class Watch:
    """Notes the time whenever the library says where it is."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.expect(0)

    def expect(self, steps: int) -> None:
        """Forgets all times; `steps` tells the sampler's calls from those of loading."""
        self.steps = steps
        self.ticks: list[tuple[float, float]] = []
        self.sampled = self.decoded = (0.0, 0.0)

    def on_step(self, step: int, steps: int, _seconds: float) -> None:
        if steps == self.steps and step >= 1 and len(self.ticks) < steps:
            self.ticks.append(_now())

    def on_log(self, level: Any, text: str) -> None:
        line = text.strip()
        if SAMPLED in line:
            self.sampled = _now()
        elif DECODED in line:
            self.decoded = _now()
        if int(level) >= WARNING:
            self.words.append(re.sub(r"^\S+\s+-\s+", "", line))

    @property
    def last_words(self) -> str:
        return "; ".join(self.words[-LAST_WORDS:]) or "it gave no reason"


class Peer:
    def __init__(self, job: Any) -> None:
        os.environ["GGML_VK_VISIBLE_DEVICES"] = ""  # the processor, as every peer
        self.job = job
        self.watch = Watch()
        self.context: Any = None
        self.decodings: list[tuple[float, float]] = []

    def prepare(self) -> dict[str, Any]:
        from importlib.metadata import version

        request = self.job["request"]
        for name in ("width_px", "height_px"):
            if request[name] % SIDE_STEP_PX:
                raise ValueError(f"{name} is {request[name]}; it draws multiples of {SIDE_STEP_PX}")
        if request["scheduler"] not in SCHEDULERS:
            raise ValueError(f"it lacks the scheduler {request['scheduler']}")
        return {
            "runtime": f"stable-diffusion.cpp of cyllama {version('cyllama-vulkan')}",
            "components": ["unet", "vae_decoder"],
            "computes": False,
            "images": True,
            "note": "the checkpoint read as float32, flash attention and direct convolution; "
            "noise of its own, and a batch is drawn one picture after the other",
        }

    def open(self, use: str) -> dict[str, Any]:
        import cyllama.sd.stable_diffusion as sd

        sd.set_log_callback(self.watch.on_log)
        sd.set_progress_callback(self.watch.on_step)
        sd.ggml_backend_load_all()
        params = sd.SDContextParams(
            model_path=self.job["checkpoint"], n_threads=threads_of(self.job), wtype=sd.SDType.F32
        )
        params.flash_attn = params.diffusion_flash_attn = True
        params.diffusion_conv_direct = params.vae_conv_direct = True
        params.free_params_immediately = False  # more is drawn with the same weights
        try:
            self.context = sd.SDContext(params)
        except (RuntimeError, ValueError, OSError) as error:
            raise RuntimeError(f"{error}: {self.watch.last_words}") from error
        return {name: {"device": "CPU", "precision": "fp32"} for name in ("unet", "vae_decoder")}

    def draw(self, steps: int, batch: int) -> None:
        import cyllama.sd.stable_diffusion as sd

        request = self.job["request"]
        method, scheduler = SCHEDULERS[request["scheduler"]]
        self.watch.expect(steps)
        try:
            self.context.generate(
                prompt=request["prompt"],
                negative_prompt=request["negative_prompt"],
                width=request["width_px"],
                height=request["height_px"],
                seed=request["seed"],
                batch_count=batch,
                sample_steps=steps,
                cfg_scale=max(float(request["guidance"]), 1.0),
                sample_method=getattr(sd.SampleMethod, method),
                scheduler=getattr(sd.Scheduler, scheduler),
            )
        except (RuntimeError, ValueError, MemoryError) as error:
            raise RuntimeError(f"{error}: {self.watch.last_words}") from error

    def timed(self, component: str, runs: int) -> tuple[list[float], list[float]]:
        """Returns wall and CPU seconds; a decoding is known from drawing for the steps before."""
        batch = self.job["request"]["batch"]
        if component == "unet":
            self.draw(runs + 1, 1)  # the first step also pays for what is allocated on first use
            ticks = self.watch.ticks
            spans = [_span(one, other) for one, other in zip(ticks, ticks[1:], strict=False)]
            self.decodings.append(_span(self.watch.sampled, self.watch.decoded))
        else:
            if not self.decodings:
                self.draw(1, 1)
                self.decodings.append(_span(self.watch.sampled, self.watch.decoded))
            spans, self.decodings = self.decodings, []
        if not spans or min(wall_s for wall_s, _ in spans) <= 0:
            raise RuntimeError(f"its callback and log told no times of {component}")
        return [wall_s * batch for wall_s, _ in spans], [cpu_s * batch for _, cpu_s in spans]

    def image(self) -> Any:
        self.draw(self.job["request"]["steps"], self.job["request"]["batch"])
        return None  # of other noise: it says nothing beside the reference's


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _span(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - start[0], end[1] - start[1]


if __name__ == "__main__":
    serve(Peer)
