"""The version, for those who need it before anything else is imported."""

__version__ = "0.1.0"
