"""Settings for all tests."""

import os
import signal

from hypothesis import settings

# A shell's background job is started without Ctrl-C, and so would be all that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines: tests are about what is right, benchmarks about what is fast. CI draws the same examples every time.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")
