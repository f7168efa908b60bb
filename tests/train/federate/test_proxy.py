"""The deployment of docs/guides/federation.md: nginx and keys by the guide's own lines, a node, and a stranger."""

import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

from tests.sharding.flower.programs import ROOT, WARM, Programs, environment_of, free_port
from tests.train.runs import PATIENCE, wait_until

pytestmark = [
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.skipif(which("nginx") is None, reason="needs nginx: apt-get install nginx"),
]

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "federation.md").read_text(encoding="utf-8")
MAIN = """daemon off; pid {0}/nginx.pid; error_log {0}/error.log; events {{}}
http {{ access_log {0}/access.log; {1}
{2} }}"""
LINK = '[superlink.mine]\naddress = "localhost:{}"\nroot-certificates = "{}/ca.crt"\n'
SECURE = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}


def make_keys(folder):
    """Run the guide's commands, which make the server's certificate and the key of node 0."""
    (block,) = re.findall(r"```console\n(\$ python -m trustme.*?)```", GUIDE, re.S)
    folder.mkdir()
    commands = "\n".join(re.findall(r"^\$ (.*)$", block, re.M))
    subprocess.run(["bash", "-ec", commands], cwd=folder, env=environment_of(folder), check=True)


def start_proxy(programs, folder, keys):
    """Start nginx with the guide's lines, of which only ports and folders are replaced; return its port."""
    (server,) = re.findall(r"```nginx\n(.*?)```", GUIDE, re.S)
    port = free_port()
    for old, new in (("8000", port), ("8001", programs.port), ("/etc/flower", keys)):
        assert old in server
        server = server.replace(old, str(new))
    (folder / "tmp").mkdir(parents=True)
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{name}_temp_path {folder}/tmp/{name};" for name in paths)
    (folder / "nginx.conf").write_text(MAIN.format(folder, temporary, server))
    programs.start("nginx", which("nginx"), "-p", folder, "-c", folder / "nginx.conf")
    return port


def start_node(programs, number, port, keys, key):
    words = ["--superlink", f"localhost:{port}", "--port", free_port(), "--root-certificates", keys / "ca.crt"]
    words += ["--auth-supernode-private-key", key, "--node-config", f"partition-id={number}"]
    programs.start(f"node-{number}", *WARM, *words, FLWR_HOME=str(programs.folder / f"home-{number}"))


def calls(folder, path):
    """Return the answers that nginx gave to calls of this path, as in its log."""
    log = (folder / "access.log").read_text() if (folder / "access.log").exists() else ""
    return re.findall(rf'"POST {path}[^"]*" (\d+) ', log)


def test_proxy_of_the_guide_admits_only_nodes_with_a_key(tmp_path):
    keys, proxy, stranger = (tmp_path / name for name in ("keys", "proxy", "stranger"))
    make_keys(keys)
    with Programs(tmp_path / "programs") as programs:
        files = [word for option, name in SECURE.items() for word in (option, keys / name)]
        programs.superlink("--enable-supernode-auth", *files)
        (programs.folder / "config.toml").write_text(LINK.format(programs.port, keys))
        register = programs.start("register", "flwr", "supernode", "register", keys / "node-0.pub", "mine")
        assert register.wait(PATIENCE) == 0
        port = start_proxy(programs, proxy, keys)
        start_node(programs, 0, port, keys, keys / "node-0.key")
        wait_until(lambda: "200" in calls(proxy, "/v1/fleet/activate-node"))  # it is in and stays so
        wait_until(lambda: "200" in calls(proxy, "/v1/fleet/pull-messages"))

        make_keys(stranger)
        (stranger / "config.toml").write_text(LINK.format(port, keys))
        for words in (("supernode", "register", stranger / "node-0.pub"), ("run", ROOT)):
            tried = programs.start("tried", "flwr", *words, "mine", FLWR_HOME=str(stranger))
            assert tried.wait(PATIENCE) != 0
        start_node(programs, 1, port, keys, stranger / "node-0.key")
        wait_until(lambda: "412" in calls(proxy, "/v1/fleet/activate-node"))
        refused = calls(proxy, "/v1/control/")
        assert refused
        assert {*refused} == {"403"}
        direct = programs.log("superlink")
        assert direct.count("POST /v1/control/register-node") == 1  # that of the operator
        assert "POST /v1/control/start-run" not in direct
