"""Run Flower's SuperNode with apps that start at once::

    python -m sharding.flower.warm --superlink 127.0.0.1:8000 …    # the options of flower-supernode

For each message Flower starts the program ``flwr-clientapp``, which imports Flower and torch. Here a script of that
name, first in the SuperNode's PATH, passes its arguments to a process that has imported both. This process forks, and
the fork runs Flower's program: each message still has a process of its own. Without an answer the script runs Flower's
program itself. For Linux and macOS.
"""

import json
import os
import signal
import socket
import sys
from importlib.metadata import entry_points
from pathlib import Path
from shutil import rmtree, which
from tempfile import mkdtemp

PROGRAM = "flwr-clientapp"
POLL = 0.1  # seconds between looks of Flower's SuperExec for messages; by default 1

SCRIPT = """#!{python} -IS
import json, os, socket, sys

try:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect({address!r})
        connection.sendall(json.dumps(sys.argv[1:]).encode())
except OSError:
    os.execv({program!r}, [{program!r}, *sys.argv[1:]])
"""


def main() -> None:
    """Become the SuperNode; a child of it starts the apps, and ends with it."""
    folder, supernode = Path(mkdtemp(prefix="supernode-")), os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address := str(folder / "socket"))
    listener.listen()
    script = folder / PROGRAM
    script.write_text(SCRIPT.format(python=sys.executable, address=address, program=which(PROGRAM)), encoding="utf-8")
    script.chmod(0o700)
    if os.fork() == 0:
        serve(listener, supernode, folder)
    else:
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", str(POLL))
        os.execvp("flower-supernode", ["flower-supernode", *sys.argv[1:]])


def serve(listener: socket.socket, supernode: int, folder: Path) -> None:
    """Fork for each list of arguments that arrives, as long as the SuperNode runs."""
    (program,) = entry_points(group="console_scripts", name=PROGRAM)
    program.load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end are not waited for
    listener.settimeout(1.0)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if os.getppid() != supernode:
                break
            continue
        with connection, connection.makefile("rb") as stream:
            words = json.load(stream)
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # As in a process of its own, the app imports its modules from where they are first in its path, which lacks
            # the working folder.
            del sys.path[0]
            for name in [name for name in sys.modules if name.partition(".")[0] == __package__.partition(".")[0]]:
                del sys.modules[name]
            sys.argv = [PROGRAM, *words]
            sys.exit(program.load()())
    rmtree(folder)


if __name__ == "__main__":
    main()
