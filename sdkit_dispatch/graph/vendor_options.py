"""The options of a vendor: a mapping from a profile -> the vendor's own frozen dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from sdkit_dispatch.errors import ConfigError

Options = TypeVar("Options")


def options_from_mapping(
    kind: type[Options],
    vendor: str,
    given: Mapping[str, Any],  # Any: the values are whatever the YAML file holds
) -> Options:
    """Returns `given`, completed with the defaults of the dataclass `kind`.

    Raises:
        ConfigError: A key is unknown or a value has a wrong type; names the ones that exist.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            raise ConfigError(
                f'options.{vendor}: unknown option "{key}"; known: {", ".join(known) or "none"}',
                hint=f'write "{near[0]}" instead of "{key}"' if near else f'remove "{key}"',
            )
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options.{vendor}: {error}") from error
