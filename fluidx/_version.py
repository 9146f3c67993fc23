"""The one place that states the version; the package metadata reads it from here."""

__version__ = "0.1.0"
