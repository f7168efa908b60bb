"""Settings for all tests."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

# The models are small: two processes on two cores are faster than two threads, and threads of both wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it once

import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("tests.train.runs")

from sharding import STRATEGIES  # noqa: E402
from tests import drawn  # noqa: E402
from train.callbacks.stopping import DivergedError  # noqa: E402
from train.cli.listing import REGISTRIES  # noqa: E402
from train.cli.sweep import FailedRun  # noqa: E402
from train.data import default_root  # noqa: E402
from train.run import run  # noqa: E402

# A shell's background job is started without Ctrl-C, and so would be all that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines: tests are about what is right, benchmarks about what is fast. CI draws the same examples every time.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")


def pytest_runtest_setup() -> None:
    """Seed what a test draws without a generator."""
    torch.manual_seed(0)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of Flower, which are two folders."""
    if item.path.parent.name in ("flower", "federate"):
        item.add_marker("flower")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one share of the long tests if there is a variable SHARE: with ``2/8`` every eighth, from the third on."""
    if share := os.environ.get("SHARE"):
        index, count = map(int, share.split("/"))
        long = [item for item in items if {"slow", "federation"} & {mark.name for mark in item.iter_markers()}]
        left = {*long} - {*long[index::count]}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the one server that all processes of the tests are forked from with what nearly all of them import.

    In this folder: it finds the modules here, and a test may be in another one when it first starts a process.
    """
    forkserver.set_forkserver_preload(["tests.train.runs", "torch._dynamo", "models.resnet", "models.small"])
    forkserver.ensure_running()


@pytest.fixture
def real_data() -> Callable[..., Path]:
    """Return where a dataset's folder, of one of these names, lies; skip the test where it is not there."""

    def find(*folders: str) -> Path:
        root = default_root().resolve()
        if not any((root / folder).is_dir() for folder in folders):
            pytest.skip("needs real data: SHARDING_DATA names the folder that holds them")
        return root

    return find


@pytest.fixture(scope="session")
def drawn_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drawn.write_all(root := tmp_path_factory.mktemp("data"))
    return root


@pytest.fixture
def drawn_data(drawn_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with drawn images and plays in the place of the real ones; no cache keeps them."""
    return drawn_once


@pytest.fixture
def registries_as_before() -> Iterator[None]:
    """What a test registers is gone after it; whoever needs it later imports the module anew."""
    registries = [STRATEGIES, *REGISTRIES.values()]
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)
    for module in [name for name in sys.modules if name.startswith("examples.own_")]:
        del sys.modules[module]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures empty, which take longer than a small run."""

    def touch(figure: object, file: object, **options: object) -> None:
        if isinstance(file, Path):
            file.touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", touch)


@pytest.fixture
def started(monkeypatch):
    """The folders' names of all runs that a command has started, in their order; they run in this process."""
    names = []

    def sweep(configs, on_round, jobs, resume, on_stage):
        failures = {}
        for config in configs:
            names.append(config.directory.name)
            try:
                run(config, resume=resume)
            except DivergedError as error:
                failures[config.directory] = FailedRun(str(error))
        return failures

    monkeypatch.setattr("train.engines.parent_process", lambda: object())  # so a run starts no processes of its own
    monkeypatch.setattr("train.cli.commands.sweep", sweep)
    return names
