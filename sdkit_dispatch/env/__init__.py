"""The vendors there are, and one virtual environment for each of them."""

from sdkit_dispatch.env.download import download
from sdkit_dispatch.env.environment import Environment, resolve
from sdkit_dispatch.env.install import install, plan_install, remove
from sdkit_dispatch.env.install_plan import InstallPlan
from sdkit_dispatch.env.states import VendorState, platform_name, state
from sdkit_dispatch.env.vendors import find_vendors, scan_vendors

__all__ = [
    "Environment",
    "InstallPlan",
    "VendorState",
    "download",
    "find_vendors",
    "install",
    "plan_install",
    "platform_name",
    "remove",
    "resolve",
    "scan_vendors",
    "state",
]
