"""Notebooks that show the package at work, and what executes them; see README.md."""
