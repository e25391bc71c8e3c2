"""Optimization profiles: size ranges -> the shapes of every input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import onnx

from sdkit_dispatch.contract import Shapes, TensorSpec
from sdkit_dispatch.errors import CompileError
from sdkit_dispatch.graph.size_ranges import AXES, Ranges
from sdkit_dispatch.graph.static_shapes import free_inputs


@dataclass(frozen=True, kw_only=True)
class InputRange:
    """Least, most usual and largest shape of an input."""

    least: tuple[int, ...]
    usual: tuple[int, ...]
    largest: tuple[int, ...]

    def holds(self, shape: Sequence[int]) -> bool:
        """Says whether a shape is within the range."""
        return len(shape) == len(self.least) and all(
            low <= size <= high
            for low, size, high in zip(self.least, shape, self.largest, strict=True)
        )


Profile = Mapping[str, InputRange]
"""Input name -> its range."""


def profiles_for(
    component: str, graph: onnx.GraphProto, shapes: Shapes, rows: Sequence[Ranges]
) -> tuple[Profile, ...]:
    """Returns the profiles of an engine; one that is just `shapes` if there are no ranges.

    Raises:
        CompileError: `shapes` is within none of them, or the graph fixes a size that they vary.
    """
    if not rows:
        return ({name: _just(shape) for name, shape in shapes.items()},)
    result = tuple(
        {name: _input_range(name, tuple(shape), row) for name, shape in shapes.items()}
        for row in rows
    )
    if profile_holding(result, shapes) is None:
        raise CompileError(
            f"{component}: the request {_written(shapes)} is outside all {len(rows)} profiles of "
            f"options.profiles.{component}: {_listed(rows)}",
            hint="widen a range, or remove the profiles: then an engine is built for each size",
        )
    for value in free_inputs(graph):
        declared = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for profile in result:
            one = profile[value.name]
            for axis, size in enumerate(declared):
                if size > 0 and (one.least[axis], one.largest[axis]) != (size, size):
                    raise CompileError(
                        f'{component}: the graph fixes axis {axis} of "{value.name}" at {size}, '
                        f"and a profile asks for {one.least[axis]} to {one.largest[axis]}",
                        hint="export the pipeline with free sizes, or remove the profile",
                    )
    return result


def profile_holding(profiles: Sequence[Profile], shapes: Shapes) -> int | None:
    """Returns the index of the narrowest profile that holds `shapes`."""
    fitting = [
        (_width(profile), index)
        for index, profile in enumerate(profiles)
        if all(profile[name].holds(shape) for name, shape in shapes.items())
    ]
    return min(fitting)[1] if fitting else None


def resized(inputs: Sequence[TensorSpec], shapes: Shapes) -> tuple[TensorSpec, ...]:
    """Returns the inputs of an engine at the shapes that it is opened at."""
    return tuple(replace(spec, shape=tuple(shapes[spec.name])) for spec in inputs)


def free_shapes(profiles: Sequence[Profile]) -> dict[str, tuple[int, ...]]:
    """Returns input -> shape, -1 where the profiles leave a size free."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in profiles[0]:
        sizes = [
            {size for p in profiles for size in (p[name].least[axis], p[name].largest[axis])}
            for axis in range(len(profiles[0][name].least))
        ]
        shapes[name] = tuple(one.pop() if len(one) == 1 else -1 for one in sizes)
    return shapes


def _input_range(name: str, shape: tuple[int, ...], row: Ranges) -> InputRange:
    axes = AXES.get(name, ())
    if len(axes) != len(shape):
        return _just(shape)
    triples = [
        getattr(row, axis) or (size, size, size) if axis else (size, size, size)
        for axis, size in zip(axes, shape, strict=True)
    ]
    least, usual, largest = (tuple(triple[k] for triple in triples) for k in range(3))
    return InputRange(least=least, usual=usual, largest=largest)


def _just(shape: Sequence[int]) -> InputRange:
    return InputRange(least=tuple(shape), usual=tuple(shape), largest=tuple(shape))


def _width(profile: Profile) -> int:
    return sum(sum(one.largest) - sum(one.least) for one in profile.values())


def _written(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def _listed(rows: Sequence[Ranges]) -> str:
    return "; ".join(
        ", ".join(
            f"{axis.name} {list(getattr(row, axis.name))}"
            for axis in fields(row)
            if getattr(row, axis.name) is not None
        )
        for row in rows
    )
