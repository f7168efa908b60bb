"""The deployment of docs/guides/federation.md: nginx with the guide's own lines, a node with a key, and a stranger."""

import re
from pathlib import Path
from shutil import which

import pytest

from tests.train.federate.stranger import move_in, tries_all
from tests.train.runs import PATIENCE, wait_until
from train.federate import launch
from train.federate.roster import Timeouts
from train.federate.supervisor import Processes

pytestmark = [
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.skipif(which("nginx") is None, reason="needs nginx: apt-get install nginx"),
]

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "federation.md"
MAIN = """daemon off; pid {0}/nginx.pid; error_log {0}/error.log; events {{}}
http {{ access_log {0}/access.log; {1}
{2} }}"""


def start_proxy(processes, folder, deployment):
    """Start nginx with the guide's lines, of which only ports and folders are replaced; return its port."""
    (server,) = re.findall(r"```nginx\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    port = launch.free_port()
    for old, new in (("8000", port), ("8001", deployment.port), ("/etc/flower", deployment.folder)):
        assert old in server
        server = server.replace(old, str(new))
    (folder / "tmp").mkdir(parents=True)
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{name}_temp_path {folder}/tmp/{name};" for name in paths)
    (folder / "nginx.conf").write_text(MAIN.format(folder, temporary, server))
    processes.start("nginx", ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")], {})
    return port


def calls(folder, path):
    """Return the answers that nginx gave to calls of this path, as in its log."""
    log = (folder / "access.log").read_text() if (folder / "access.log").exists() else ""
    return re.findall(rf'"POST {path}[^"]*" (\d+) ', log)


def test_proxy_of_the_guide_admits_only_nodes_with_a_key(tmp_path):
    timeouts = Timeouts(PATIENCE, PATIENCE)
    config, settings = launch.configure("configs/quickstart.yaml", [f"output={tmp_path / 'run'}"], 2, timeouts)
    deployment, proxy, stranger = launch.lay_out(config, settings), tmp_path / "proxy", tmp_path / "stranger"
    with Processes(deployment.folder / "logs") as processes:
        launch.start_server(processes, deployment)
        port = start_proxy(processes, proxy, deployment)
        outside = launch.Deployment(deployment.folder, port)
        launch.start_node(processes, outside, 0, launch.node_settings(config, deployment, 0))
        wait_until(lambda: "200" in calls(proxy, "/v1/fleet/activate-node"))  # it is in and stays so
        wait_until(lambda: "200" in calls(proxy, "/v1/fleet/pull-messages"))

        move_in(stranger, outside.address, deployment.folder / "ca.crt")
        assert all(tried.returncode for tried in tries_all(stranger))
        (deployment.folder / "node-1" / "node.key").write_bytes((stranger / "node.key").read_bytes())
        launch.start_node(processes, outside, 1, {"partition-id": 1})
        wait_until(lambda: "412" in calls(proxy, "/v1/fleet/activate-node"))
        refused = calls(proxy, "/v1/control/")
        assert refused
        assert {*refused} == {"403"}
        direct = (deployment.folder / "logs" / "superlink.log").read_text()
        assert direct.count("POST /v1/control/register-node") == 2  # those of the operator
        assert "POST /v1/control/start-run" not in direct
