"""Ranges of sizes that one engine serves, as a vendor's option `profiles` gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sdkit_dispatch.contract import BuildRequest, Shapes, SizeRanges
from sdkit_dispatch.errors import ConfigError

TOKENS_PER_CHUNK = 77

AXES: Mapping[str, tuple[str, ...]] = {
    "input_ids": ("batch", "tokens"),
    "sample": ("batch", "", "height", "width"),
    "latent_sample": ("batch", "", "height", "width"),
    "timestep": ("batch",),
    "timestep_cond": ("batch", ""),
    "encoder_hidden_states": ("batch", "tokens", ""),
    "text_embeds": ("batch", ""),
    "time_ids": ("batch", ""),
}
"""Input -> what its axes are; "" is one that never changes."""

Range = tuple[int, int, int]
"""Least, most usual and largest size."""


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Sizes that an engine serves, in the units of the component's own tensors.

    None is the one size that was asked for.

    Attributes:
        height: Of latents (or pixels, where a component takes an image).
        tokens: Multiples of 77.
    """

    batch: Range | None = None
    height: Range | None = None
    width: Range | None = None
    tokens: Range | None = None


def plan_ranges(profiles: Mapping[str, Sequence[Ranges]]) -> SizeRanges:
    """Returns the option as `Plan.ranges` has it: without the axes that have no range."""
    return {
        component: tuple(
            {axis: sizes for axis, sizes in asdict(row).items() if sizes is not None}
            for row in rows
        )
        for component, rows in profiles.items()
    }


def does_serve(request: BuildRequest, shapes: Shapes) -> bool:
    """True if the engine of a request can be opened at `shapes`: its own, or within its ranges."""
    profiles = request.options.get("profiles") or {}
    rows = [
        {axis: sizes for axis, sizes in row.items() if sizes is not None}
        for row in profiles.get(request.component, ())
    ]
    usual = usual_shapes(shapes, rows) if rows else shapes
    return usual is not None and dict(usual) == dict(request.shapes)


def usual_shapes(shapes: Shapes, rows: Sequence[Mapping[str, Range]]) -> Shapes | None:
    """Returns the shapes that an engine for `rows` is built at, whichever of its sizes is asked.

    Args:
        shapes: What is asked for.
        rows: Alternatives; the narrowest that holds `shapes` counts.

    Returns:
        None if no row holds `shapes`.
    """
    fitting = [row for row in rows if _holds(shapes, row)]
    if not fitting:
        return None
    row = min(fitting, key=lambda one: sum(high - low for low, _, high in one.values()))
    return {
        name: tuple(
            row[axis][1] if axis in row else size for axis, size in _sizes_by_axis(name, shape)
        )
        for name, shape in shapes.items()
    }


def check_ranges(
    vendor: str,
    profiles: Mapping[str, Sequence[Ranges]],
    given: Mapping[str, Any],  # Any: whatever the YAML file holds
) -> None:
    """Refuses ranges that no builder would take, and axes in `given` that do not exist.

    Raises:
        ConfigError: Names the profile, the axis and its values.
    """
    known = [axis.name for axis in fields(Ranges)]
    for component, rows in (given.get("profiles") or {}).items():
        for index, row in enumerate(rows):
            for key in row:
                if key not in known:
                    raise ConfigError(
                        f'options.{vendor}.profiles.{component}[{index}]: unknown axis "{key}"; '
                        f"known: {', '.join(known)}",
                        hint=f'remove "{key}"',
                    )
    for component, rows in profiles.items():
        for index, ranges in enumerate(rows):
            for axis in fields(ranges):
                sizes: Range | None = getattr(ranges, axis.name)
                where = f"options.{vendor}.profiles.{component}[{index}].{axis.name}"
                if sizes is None:
                    continue
                if not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
                    raise ConfigError(
                        f"{where}: {list(sizes)} is not [least, usual, largest], from 1",
                        hint="write the three sizes in rising order",
                    )
                if axis.name == "tokens" and any(size % TOKENS_PER_CHUNK for size in sizes):
                    raise ConfigError(
                        f"{where}: {list(sizes)} are not multiples of {TOKENS_PER_CHUNK}",
                        hint="a prompt is cut into chunks of 77 tokens: 77, 154, 231, ...",
                    )


def _holds(shapes: Shapes, row: Mapping[str, Range]) -> bool:
    return all(
        row[axis][0] <= size <= row[axis][2]
        for name, shape in shapes.items()
        for axis, size in _sizes_by_axis(name, shape)
        if axis in row
    )


def _sizes_by_axis(name: str, shape: Sequence[int]) -> list[tuple[str, int]]:
    axes = AXES.get(name, ())
    if len(axes) != len(shape):
        axes = ("",) * len(shape)
    return list(zip(axes, shape, strict=True))
