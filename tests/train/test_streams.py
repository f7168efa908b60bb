"""Where the command line writes may be closed or full: it says so, and what was trained is kept."""

import os
import sys

import pytest

from train.cli.commands import main


def test_a_closed_standard_output_is_no_reason_to_fail(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["config", "configs/quickstart.yaml", f"output={tmp_path}"]) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_standard_output_is_one_line(capsys, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY | os.O_CREAT), "w", closefd=False))
        assert main(["config", "configs/quickstart.yaml", f"output={tmp_path}"]) == 1
    assert "error: No space left" in capsys.readouterr().err
