"""The null vendor under other names. Slowness is work, not sleep: the same graph again."""

import os
from dataclasses import replace

from sdkit_dispatch.errors import CompileError
from sdkit_null.adapter import NullAdapter

VERSION = "FAKE_SWIFT_VERSION"
"""Environment variable: the version that the runtime of the swift one has."""
TIMES = 6
"""How often the slow one computes: far more than a busy machine adds."""


class SwiftAdapter(NullAdapter):
    name = "fake-swift"

    def probe(self, device):
        version = os.environ.get(VERSION, "1") if self.name == "fake-swift" else "1"
        return f"{self.name} {version}"

    def plan(self, device, precision, options):
        found = super().plan(device, precision, {})
        return replace(found, vendor=self.name, runtime=self.probe(device), reasons=("ranked",))


class SlowAdapter(SwiftAdapter):
    name = "fake-slow"

    def load(self, engine, device):
        session = super().load(engine, device)
        run = session.run

        def slowly(feeds):
            for _ in range(TIMES - 1):
                run(feeds)
            return run(feeds)

        session.run = slowly
        return session


class BrokenAdapter(SwiftAdapter):
    name = "fake-broken"

    def compile(self, request, onnx, out, *, device, report, siblings=()):
        raise CompileError("fake-broken: it compiles nothing")
