"""What to build engines for, and the request that names each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import graph
from .contract import BuildRequest, GenerateRequest, Plan, Shapes, VendorSpec
from .diffusion.shapes import component_shapes, unet_multiple
from .errors import CompileError
from .graph.size_ranges import usual_shapes
from .pipeline_files import Pipeline, component_digests


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to build engines for: a pipeline and the shapes that a request needs."""

    pipeline: Pipeline
    request: GenerateRequest
    token_chunks: int
    shapes: Mapping[str, Shapes]
    digests: Mapping[str, tuple[str, str]]


def wanted(
    pipeline: Pipeline, request: GenerateRequest, *, token_chunks: int, memo: Path
) -> Wanted:
    """Returns what must be built so that `request` can run.

    Raises:
        ConfigError: The size does not divide.
        PipelineError: A file cannot be read, or a graph is fixed at another shape.
    """
    shapes = component_shapes(pipeline, request, token_chunks=token_chunks)
    digests = {name: component_digests(pipeline.components[name], memo=memo) for name in shapes}
    return Wanted(
        pipeline=pipeline,
        request=request,
        token_chunks=token_chunks,
        shapes=shapes,
        digests=digests,
    )


def build_request(plan: Plan, spec: VendorSpec, want: Wanted, component: str) -> BuildRequest:
    """Returns the request whose key names the engine.

    Raises:
        CompileError: The sizes are outside all ranges that the plan's engine would serve.
    """
    graph_digest, weights_digest = want.digests[component]
    shapes: Shapes | None = want.shapes[component]
    rows = plan.ranges.get(component)
    if rows:
        shapes = usual_shapes(want.shapes[component], rows)
    if shapes is not None and rows and component == "unet":
        _require_even(want, plan, shapes)
    if shapes is None:
        ranges = "; ".join(written_sizes(row) for row in rows or ())
        raise CompileError(
            f"{component}: {written_sizes(want.shapes[component])} is outside the size ranges "
            f"{ranges} of options.{plan.vendor}.profiles",
            "widen a range, or remove it: then an engine is built for each size",
        )
    return BuildRequest(
        vendor=plan.vendor,
        revision=spec.revision,
        runtime=plan.runtime,
        target=plan.target,
        component=component,
        graph_digest=graph_digest,
        weights_digest=weights_digest,
        precision=plan.precision,
        shapes=shapes,
        options=plan.options,
        passes=graph.REVISION,
    )


def _require_even(want: Wanted, plan: Plan, usual: Shapes) -> None:
    """Refuses sizes that only a graph made for them computes (`graph.upsampling`).

    Raises:
        CompileError: A side does not halve evenly; an engine of a range would not run.
    """
    multiple = unet_multiple(want.pipeline)
    for shapes in (want.shapes["unet"], usual):
        if any(side % multiple for side in shapes["sample"][2:]):
            raise CompileError(
                f"unet: sample {list(shapes['sample'])} has sides that do not divide by "
                f"{multiple}, and the engine of the size ranges of options.{plan.vendor}.profiles "
                "serves no others",
                "remove the range of unet: then an engine is built for each size",
            )


def written_sizes(sizes: Shapes) -> str:
    """Returns the sizes of a component in words."""
    return ", ".join(f"{name} {list(values)}" for name, values in sizes.items())
