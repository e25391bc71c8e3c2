"""What the caller chose, and what it makes of a decision."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import Profile
from .contract import Plan, Precision
from .detect.choice import gpus_of
from .errors import ConfigError, NoVendorError
from .plan import Decision, explain_rejections

SAMPLE = "sample"
"""In place of a pipeline folder: the small pipeline in the package, with its profile."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the caller chose; the rest is chosen for them.

    Attributes:
        gpu: "auto", "cpu", "gpu:N", a device id or a part of a device's name.
        vendor: Only this vendor.
        precision: Of the build; the vendor's best by default.
        profile: A name or a file; the sample's own for the sample, else "default".
        force: Sets the option `force` of `vendor`: what its makers advise against.
        must_check: False leaves engines unchecked.
        may_retry: What failed here before is tried again.
        must_use_gpu: Another device than a GPU is an error.
    """

    gpu: str = "auto"
    vendor: str | None = None
    precision: Precision | None = None
    profile: str | None = None
    must_check: bool = True
    may_retry: bool = False
    force: bool = False
    must_use_gpu: bool = False


def pipeline_folder(pipeline: str | Path) -> Path:
    """Returns the folder that the user means; `SAMPLE` is the one in the package."""
    if str(pipeline) != SAMPLE:
        return Path(os.path.expanduser(pipeline))  # unlike Path's, it leaves ~nobody as it is
    return Path(__file__).with_name("_data") / "sample" / "digits-sd"


def sample_choice(pipeline: str | Path, choice: Choice) -> Choice:
    """Returns `choice` with the sample's own profile, if it is the sample and none was chosen."""
    if str(pipeline) == SAMPLE and choice.profile is None:
        return replace(choice, profile=SAMPLE)
    return choice


def serving(decision: Decision, choice: Choice) -> tuple[Plan, ...]:
    """Returns the plans that the caller's choice allows.

    Raises:
        NoVendorError: There is none; lists every reason.
    """
    if not decision.plans:
        raise NoVendorError(explain_rejections(decision), "sdkit-dispatch vendors list")
    if not choice.must_use_gpu:
        return decision.plans
    gpus = gpus_of(plan.device for plan in decision.plans)
    if not gpus:
        raise NoVendorError(
            f"no GPU serves, and --require-gpu forbids {decision.plans[0].device.name}; "
            f"{explain_rejections(decision)}",
            "sdkit-dispatch plan",
        )
    return tuple(plan for plan in decision.plans if plan.device in gpus)


def vendor_options(profile: Profile, choice: Choice) -> Mapping[str, Mapping[str, Any]]:
    """Returns the options of every vendor (`Any`: each owns its values).

    Raises:
        ConfigError: Something is forced, and no vendor is named.
    """
    if not choice.force:
        return profile.options
    if choice.vendor is None:
        raise ConfigError("--force needs the vendor that it is for", "--vendor tensorrt-rtx")
    own = {**profile.options.get(choice.vendor, {}), "force": True}
    return {**profile.options, choice.vendor: own}
