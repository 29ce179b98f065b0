"""Hypothesis runs the same examples every time, so that a red run means a change; HYPOTHESIS_PROFILE=explore draws
new ones."""

import os

from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
