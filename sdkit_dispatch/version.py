"""The version of sdkit-dispatch; the build reads it from here."""

__version__ = "0.1.0"
