"""YAML -> `Profile` (WHAT to build) and `Config` (HOW to run here), and where our files are."""

from sdkit_dispatch.config.folders import home_folder, shipped_folder
from sdkit_dispatch.config.profile import Profile, available_profiles, load_profile
from sdkit_dispatch.config.settings import Config, load_config

__all__ = [
    "Config",
    "Profile",
    "available_profiles",
    "home_folder",
    "load_config",
    "load_profile",
    "shipped_folder",
]
