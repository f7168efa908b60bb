"""Settings for all tests."""

import os

from hypothesis import settings

# No deadlines: tests are about what is right, benchmarks about what is fast. CI draws the same examples every time.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")
