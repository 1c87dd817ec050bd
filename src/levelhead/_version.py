"""The version, once: the build reads it from here, so that importing needs no package metadata."""

__version__ = "0.1.0"
