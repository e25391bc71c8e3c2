"""Draws a plain colour made of the request; faults on request, through its prompt or options."""

import hashlib
import os

import numpy as np

from sdkit_dispatch.contract import Plan, Progress
from sdkit_dispatch.errors import ConfigError, PipelineError, RunError


class FakePipelineAdapter:
    threads = None
    loaded = 0

    def probe(self, device):
        return "fake 1.0"

    def plan(self, device, precision, options):
        return Plan(
            vendor="fake-pipeline",
            device=device,
            precision=precision or "fp32",
            runtime="fake 1.0",
            options=dict(options),
        )

    def load(self, checkpoint, device, *, options):
        if options.get("fault") == "load":
            raise RunError(f"fake: {device.id} does not open")
        if options.get("fault") == "abort":
            os.abort()
        if options.get("fault") == "unknown":
            raise PipelineError("fake: this kind of model is unknown")
        FakePipelineAdapter.loaded += 1
        return FakePipelineSession(checkpoint, device, options.get("precision", "fp32"))


class FakePipelineSession:
    def __init__(self, checkpoint, device, precision):
        self.colour = hashlib.sha256(checkpoint.read_bytes()).digest()[:3]
        self.facts = {
            "device": device.name,
            "precision": precision,
            "loaded": str(FakePipelineAdapter.loaded),
        }

    def generate(self, request, report):
        for step in range(request.steps):
            report(Progress(phase="denoise", fraction=(step + 1) / request.steps))
        match request.prompt:
            case "abort":
                os.abort()
            case "wrong size":
                return np.zeros((1, 8, 8, 3), np.uint8)
            case "wait":
                while True:
                    report(Progress(phase="denoise"))
            case "lacks it":
                raise ConfigError("fake: the scheduler is not there", "change --scheduler")
        shape = (request.batch, request.height_px, request.width_px, 3)
        images = np.zeros(shape, np.uint8)
        for index in range(request.batch):
            images[index] = (
                np.frombuffer(self.colour, np.uint8).astype(int) + request.seed + index
            ) % 256
        return images

    def close(self):
        self.colour = None
