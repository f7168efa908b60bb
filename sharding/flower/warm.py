"""Run Flower's SuperNode with apps that start at once::

    python -m sharding.flower.warm --superlink 127.0.0.1:8000 …    # the options of flower-supernode

For each message Flower starts the program ``flwr-clientapp``, which imports Flower, torch and the app. Here a script of
that name, first in the SuperNode's PATH, passes its arguments to a process that has imported Flower, torch, and the
installed packages that earlier messages needed. This process forks, and the fork runs Flower's program: each message
still has a process of its own. Without an answer the script runs Flower's program itself. For Linux and macOS.
"""

import json
import os
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from shlex import quote
from shutil import rmtree, which
from tempfile import mkdtemp
from typing import NoReturn

PROGRAM = "flwr-clientapp"
SOCKET = "socket"
POLL = 0.1  # seconds between looks of Flower's SuperExec for messages; by default 1

LONGEST = 100  # bytes of a socket's path; systems allow a few more

SCRIPT = """#!/bin/sh
exec {python} -IS {code} "$@"
"""
CODE = """import json, os, socket, sys

try:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect({address!r})
        connection.sendall(json.dumps({{"run": sys.argv[1:]}}).encode())
except OSError:
    os.execv({program!r}, [{program!r}, *sys.argv[1:]])
"""


def main() -> None:
    """Become the SuperNode; a child of it starts the apps, and ends with it."""
    folder, supernode = make_folder(), os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / SOCKET))
    listener.listen()
    write_script(folder, sys.executable, which(PROGRAM))
    if os.fork() == 0:
        serve(listener, supernode)
        rmtree(folder)
    else:
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", str(POLL))
        os.execvp("flower-supernode", ["flower-supernode", *sys.argv[1:]])


def make_folder() -> Path:
    """Make a temporary folder in which a socket can be."""
    folder = Path(mkdtemp(prefix="supernode-"))
    if len(os.fsencode(folder / SOCKET)) <= LONGEST:
        return folder
    folder.rmdir()
    return Path(mkdtemp(prefix="supernode-", dir="/tmp"))


def write_script(folder: Path, python: str, program: str | None) -> None:
    """Write the script that passes its arguments to the socket of its folder, or else to Flower's program.

    The interpreter's path may have spaces, which the first line of a script cannot have.
    """
    code, script = folder / "ask.py", folder / PROGRAM
    code.write_text(CODE.format(address=str(folder / SOCKET), program=program), encoding="utf-8")
    script.write_text(SCRIPT.format(python=quote(python), code=quote(str(code))), encoding="utf-8")
    script.chmod(0o700)


def serve(listener: socket.socket, supernode: int) -> None:
    """Fork for each list of arguments that arrives, and import what forks report, as long as the SuperNode runs."""
    (program,) = entry_points(group="console_scripts", name=PROGRAM)
    program.load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end are not waited for
    listener.settimeout(1.0)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if os.getppid() != supernode:
                return
            continue
        with connection, connection.makefile("rb") as stream:
            asked = json.load(stream)
        if "run" not in asked:
            for name in asked["import"]:
                with suppress(Exception):
                    import_module(name)
        elif os.fork() == 0:
            address = listener.getsockname()
            listener.close()  # else it would accept arguments that nobody reads
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(program.load(), asked["run"], address)


def run(program: Callable[[], int | None], words: Sequence[str], address: str) -> NoReturn:
    """Run Flower's program in a fork, and report what it has imported."""
    del sys.path[0]  # the working folder, which a program does not have in its path
    # The app may bring another version of this package.
    for name in [name for name in sys.modules if name.partition(".")[0] == "sharding"]:
        del sys.modules[name]
    known, sys.argv = {*sys.modules}, [PROGRAM, *words]
    try:
        sys.exit(program())
    finally:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(json.dumps({"import": installed(known)}).encode())


def installed(known: Collection[str]) -> list[str]:
    """Return the imported modules of installed packages, in the order of import, but for known ones and this package's.

    The app's own modules are none of them.
    """
    folders = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
    origins = {name: getattr(getattr(module, "__spec__", None), "origin", None) for name, module in sys.modules.items()}
    new = [name for name, origin in origins.items() if name not in known and str(origin).startswith(folders)]
    return [name for name in new if name.partition(".")[0] != "sharding"]


if __name__ == "__main__":
    main()
