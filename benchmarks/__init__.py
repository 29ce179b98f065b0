"""Measurements, not part of the installed package: ``python -m benchmarks.decode`` and ``benchmarks.agreement``."""
