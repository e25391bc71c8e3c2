"""Every error that sdkit-dispatch raises on purpose.

    * DispatchError(message, hint)
      x ConfigError            a YAML file or a value on the command line is wrong
      x PipelineError          the folder or checkpoint is not a pipeline we can read
      x NoVendorError          no vendor can run this here; lists every reason
      x VendorEnvError         a vendor's environment could not be made
      x WorkerError            the worker died, hung or talked nonsense
      x CompileError           the vendor refused a component
        + UnsupportedOpError   ... because of operators; names all of them at once
      x NumericError           the engine runs, but its outputs are wrong
      x CacheError             an engine in the store is damaged
      x RunError               wrong feeds, or the device failed while running

A message says what failed with its value, what was asked and what exists, and starts in lower
case. The hint is one command or one edit. Anything else that is raised is a bug of ours.
"""

from __future__ import annotations

from typing import ClassVar


class DispatchError(Exception):
    """Base of all errors that are meant for the user.

    Attributes:
        message: What failed, with its value.
        hint: One command to run or one edit to make; may be empty.
        exit_code: What the command line exits with.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(DispatchError):
    """A YAML file, an environment variable or a command line value is wrong."""

    exit_code = 2


class PipelineError(DispatchError):
    """The folder or checkpoint is not a pipeline that can be read."""

    exit_code = 2


class NoVendorError(DispatchError):
    """No vendor can run the request here; the message lists every reason."""

    exit_code = 3


class VendorEnvError(DispatchError):
    """A vendor's environment could not be made or used."""

    exit_code = 3


class WorkerError(DispatchError):
    """The worker process died, hung or sent something that is not a frame.

    Attributes:
        was_killed: It was ended from outside (by a user, or for want of memory): trying again may
            well work.
        was_lost: It died by itself or hung: trying the same again is likely to end the same.
    """

    was_killed: bool = False
    was_lost: bool = False


class CompileError(DispatchError):
    """The vendor's compiler refused a component."""


class UnsupportedOpError(CompileError):
    """The vendor lacks operators; the message names all of them."""


class NumericError(DispatchError):
    """The engine runs, but its outputs differ from the reference."""


class CacheError(DispatchError):
    """An engine in the store is damaged.

    Attributes:
        concerns_store: The disk is full or cannot be written: no other vendor would fare better.
    """

    concerns_store: bool = False


class RunError(DispatchError):
    """The feeds are wrong, or the device failed while it ran."""


class CancelledByUser(Exception):  # noqa: N818 - not an error: it was asked for
    """The work was cancelled on request; raised inside a worker by `report`."""


ERROR_KINDS: dict[str, type[DispatchError]] = {
    kind.__name__: kind
    for kind in (
        DispatchError,
        ConfigError,
        PipelineError,
        NoVendorError,
        VendorEnvError,
        WorkerError,
        CompileError,
        UnsupportedOpError,
        NumericError,
        CacheError,
        RunError,
    )
}
"""Class name -> class, to raise an error again on the other side of the wire."""
