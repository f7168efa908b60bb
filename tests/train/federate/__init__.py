"""Federation needs the extra `federate`: without it, all of these tests are skipped; CI sets REQUIRE_FLOWER."""

import os

import pytest

if "REQUIRE_FLOWER" not in os.environ:
    pytest.importorskip("flwr", reason="needs the extra `federate`")
