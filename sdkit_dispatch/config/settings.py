"""A config: HOW to run on this machine. It never changes an engine key."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sdkit_dispatch.config import fields
from sdkit_dispatch.config.folders import home_folder, shipped_folder
from sdkit_dispatch.config.profile import checked
from sdkit_dispatch.config.strict_yaml import nearest, read_yaml, scalar_from_text
from sdkit_dispatch.errors import ConfigError

VARIABLE_PREFIX = "SDKIT_DISPATCH_"
OTHER_VARIABLES = ("HOME", "GPU", "ARCH", "TEST_NETWORK")
"""Variables with our prefix that are no settings: folders.py, detect/README.md, the tests."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Config:
    """How to run here; every key is explained in `configs/default.yaml`.

    Attributes:
        threads: CPU threads of a worker; None lets the runtime choose.
        memory_budget_mb: Of loaded components together, in MB (10**6 bytes); None for the
            memory of the device.
        env: "auto", "managed", "current", or the path of a Python or of an environment.
        store_quota_mb: What the stored engines may take together, in MB; None for no limit.
        shared_stores: Home folders of others, whose engines are used and never written.
        parallel_builds: How many engines may be compiled on this host at a time.
        sources: Key -> where its value came from, for whoever asks why.
    """

    threads: int | None = None
    memory_budget_mb: int | None = None
    probe_timeout_s: float = 120.0
    compile_timeout_s: float = 3600.0
    load_timeout_s: float = 900.0
    run_timeout_s: float = 7200.0
    may_install: Literal["ask", "yes", "no"] = "ask"
    env: str = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    strict: bool = False
    store_quota_mb: int | None = None
    shared_stores: tuple[str, ...] = ()
    parallel_builds: int = 1
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def timeouts_s(self) -> dict[str, float]:
        """Request of a worker -> seconds that it may take in all."""
        return {
            "probe": self.probe_timeout_s,
            "plan": self.probe_timeout_s,
            "compile": self.compile_timeout_s,
            "load": self.load_timeout_s,
            "run": self.run_timeout_s,
            "time": self.run_timeout_s,
            "generate": self.run_timeout_s,
            "record": self.run_timeout_s,
        }


_TIMEOUT_S = fields.number(0.1, 7 * 24 * 3600.0)
_SIZE_MB = fields.auto_or(fields.integer(1, 10**9))

CONFIG_FIELDS: Mapping[str, fields.Check] = {
    "threads": fields.auto_or(fields.integer(1, 1024)),
    "memory_budget_mb": _SIZE_MB,
    "probe_timeout_s": _TIMEOUT_S,
    "compile_timeout_s": _TIMEOUT_S,
    "load_timeout_s": _TIMEOUT_S,
    "run_timeout_s": _TIMEOUT_S,
    "may_install": fields.one_of("ask", "yes", "no"),
    "env": fields.text,
    "log_level": fields.one_of("debug", "info", "warning", "error"),
    "strict": fields.flag,
    "store_quota_mb": _SIZE_MB,
    "shared_stores": fields.folders,
    "parallel_builds": fields.integer(1, 64),
}


def load_config(
    file: Path | None = None,
    *,
    home: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """Returns the settings, each from the last of these that names it.

    The defaults, the shipped `configs/default.yaml`, `<home>/config.yaml`, `file`, an environment
    variable (`SDKIT_DISPATCH_THREADS`, ...), a flag of the command line.

    Args:
        file: What the user gave with --config.
        home: The home folder; by default as `home_folder` finds it.
        environ: The environment variables; by default those of this process.
        flags: Key -> value as given on the command line; None where it was not given.

    Raises:
        ConfigError: Says the file and line, variable or flag, and what it may be.
    """
    environ = os.environ if environ is None else environ
    home = home or home_folder(environ)
    values: dict[str, Any] = {}  # Any: as the fields return them
    sources = dict.fromkeys(CONFIG_FIELDS, "default")

    own = home / "config.yaml"
    # os.path: a home that may not be read has no settings, and is no error.
    is_there = os.path.exists(own)
    files = [shipped_folder("configs") / "default.yaml", *([own] if is_there else [])]
    for path in [*files, *([file] if file else [])]:
        document = read_yaml(path)
        values |= checked(document, CONFIG_FIELDS)
        sources |= {key: f"{path}:{document.lines[(key,)]}" for key in document.data}

    for key in CONFIG_FIELDS:
        variable = VARIABLE_PREFIX + key.upper()
        if environ.get(variable, "").strip():
            values[key] = _from_outside(variable, key, scalar_from_text(environ[variable].strip()))
            sources[key] = variable

    known = {key.upper() for key in CONFIG_FIELDS}.union(OTHER_VARIABLES)
    for variable in sorted(environ):
        name = variable.removeprefix(VARIABLE_PREFIX)
        if name != variable and name not in known:
            log.warning("the variable %s is none of ours: %s", variable, nearest(name, known))

    for key, value in (flags or {}).items():
        flag = "--" + key.replace("_", "-")
        if key not in CONFIG_FIELDS:
            raise ConfigError(f"{flag}: unknown setting", nearest(key, CONFIG_FIELDS))
        if value is not None:
            plain = scalar_from_text(value) if isinstance(value, str) else value
            values[key] = _from_outside(flag, key, plain)
            sources[key] = flag
    return Config(**values, sources=sources)


def _from_outside(name: str, key: str, value: object) -> Any:
    # Any: what the field returns.
    try:
        return CONFIG_FIELDS[key](value)
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}, but must be {error}", f"change {name}") from None
