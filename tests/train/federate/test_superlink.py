"""The SuperLink of `train federate` takes nodes and runs from the operator only."""

import re

import pytest

from tests.train.federate.stranger import flwr, move_in, tries_all
from train.federate import launch
from train.federate.roster import Timeouts
from train.federate.server_app import read
from train.federate.superlink import ACCESS_TOKEN_KEY, TOKEN, TokenPlugin
from train.federate.supervisor import Processes


@pytest.mark.parametrize("told", [[], [(ACCESS_TOKEN_KEY, "")], [(ACCESS_TOKEN_KEY, "secre")], [("other", "secret")]])
def test_token_plugin_admits_only_callers_with_the_token(monkeypatch, told):
    monkeypatch.setenv(TOKEN, "secret")
    plugin = TokenPlugin()
    with pytest.raises(KeyError):  # the apps that Flower starts do not inherit it
        TokenPlugin()
    assert plugin.validate_tokens_in_metadata(told) == (False, None)
    assert plugin.refresh_tokens(told) == (None, None)
    admitted, account = plugin.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, "secret")])
    assert admitted
    assert account is not None


@pytest.mark.federation
def test_superlink_refuses_runs_of_other_users(tmp_path):
    settings = launch.settings_of("configs/quickstart.yaml", [f"output={tmp_path / 'run'}"], 2, Timeouts(60.0, 60.0))
    place = launch.lay_out(read(settings), settings)
    assert place.folder.stat().st_mode & 0o077 == 0  # its keys and token are the operator's own
    assert place.token not in repr(place)
    with Processes(place.folder / "logs") as processes:
        launch.start_server(processes, place)
        move_in(tmp_path / "stranger", place.address, place.folder / "ca.crt")
        assert all(tried.returncode for tried in tries_all(tmp_path / "stranger"))
        assert flwr(place.folder / "homes" / "operator", "list", "loopback").returncode == 0
    calls = re.findall(r'"POST /v1/control/([\w-]+)[^"]*" (\d+)', (place.folder / "logs/superlink.log").read_text())
    assert {*calls} >= {("register-node", "401"), ("start-run", "401"), ("register-node", "200")}
    assert calls.count(("register-node", "200")) == 2  # those of the operator
    assert ("start-run", "200") not in calls
