"""Ray on clusters of several nodes: the bits of `sequential`, whatever joins and whatever dies."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sharding import UserError
from tests.train.engines.jobs import assert_equal, make_job, make_plan, with_bad_clients
from tests.train.runs import QUICKSTART, TINY, assert_same, read, tiny, wait_until
from train.engines import RayEngine
from train.engines.sequential import SequentialEngine
from train.run import run

LR = 0.05
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's test cluster leaves files and processes open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    """A cluster of a head and one more node, with a core each."""
    pytest.importorskip("ray", reason="needs pip install -e '.[ray]'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else workers starve on a machine that tests other things too
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
        cluster.add_node(**NODE)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def joined(cluster, monkeypatch):
    """The same, named by the variable that Ray reads; the driver leaves it after the test."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()


def test_ray_engine_without_ray_raises_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"^engine=ray needs the package ray: pip install -e '.\[ray\]'$"):
        RayEngine(make_job())


def test_ray_engine_with_a_parametrized_model_raises_with_the_remedy(monkeypatch):
    job = replace(make_job(), model=nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 5))))
    monkeypatch.setattr("train.engines.ray.connect", lambda: Mock(put=pickle.dumps))
    with pytest.raises(UserError, match=r"cannot be sent to other processes \(Serialization.*engine=sequential"):
        RayEngine(job)


def test_ray_engine_without_a_cluster_raises_with_the_remedy(monkeypatch):
    ray = pytest.importorskip("ray", reason="needs pip install -e '.[ray]'")

    def init(**options):
        raise ConnectionError("Could not find any running Ray instance.\nSecond line.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match=r"^engine=ray.*Could not find[^\n]*`ray start --head`[^\n]*engine=processes$"):
        RayEngine(make_job())


def with_watch(job, watch):
    """The same job, but before a batch is prepared its worker calls `watch` with the id of its node."""
    prepare = job.dataset.prepare

    def counting(batch):
        import ray

        watch(ray.get_runtime_context().get_node_id())
        return prepare(batch)

    return replace(job, dataset=replace(job.dataset, prepare=counting))


def meeting(folder, count):
    """Return a watch that goes on when there are clients on `count` nodes at once."""

    def watch(node):
        (folder / node).touch()
        wait_until(lambda: len(list(folder.iterdir())) >= count)

    return watch


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 4])
def test_ray_with_two_nodes_equals_sequential(ahead, joined, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("train.engines.ray.AHEAD", ahead)
    job = with_bad_clients(make_job("cct"))
    engine = RayEngine(with_watch(job, meeting(tmp_path, 2)))
    for round in (0, 1):
        plan = make_plan(job, round=round)
        expected = list(SequentialEngine(job).train(plan, round, LR))
        caplog.clear()
        assert_equal(expected, list(engine.train(plan, round, LR)))
        assert [record.getMessage().split(":")[0] for record in caplog.records] == [
            f"client {client} failed in round {round}" for client in (2, 5)
        ]
    engine.close()


@pytest.mark.slow
def test_ray_node_that_joins_during_a_round_is_used(joined, tmp_path):
    job = make_job()
    (grown := tmp_path / "nodes").mkdir()
    meet = meeting(grown, 3)
    engine = RayEngine(with_watch(job, lambda node: meet(node) if (tmp_path / "grows").exists() else None))
    plan = make_plan(job)
    updates = engine.train(plan, 0, LR)
    first = next(updates)
    (tmp_path / "grows").touch()
    node = joined.add_node(**NODE)
    assert_equal(list(SequentialEngine(job).train(plan, 0, LR)), [first, *updates])
    joined.remove_node(node)


@pytest.mark.slow
def test_ray_node_that_dies_during_a_round_loses_no_update(joined, tmp_path):
    node = joined.add_node(**NODE)
    doomed, job, plan = node.node_id, make_job(), make_plan(make_job())

    def watch(at):
        if at == doomed:
            (tmp_path / "reached").touch()
            wait_until(lambda: False)  # its client never ends

    engine = RayEngine(with_watch(job, watch))
    with ThreadPoolExecutor() as pool:
        updates = pool.submit(lambda: list(engine.train(plan, 0, LR)))
        wait_until((tmp_path / "reached").exists)
        joined.remove_node(node, allow_graceful=False)
        assert_equal(list(SequentialEngine(job).train(plan, 0, LR)), updates.result())


@pytest.mark.slow
def test_run_on_a_ray_cluster_equals_sequential(joined, tmp_path):
    whole = run(tiny(tmp_path / "sequential"))
    assert_same(run(tiny(tmp_path / "ray", "engine=ray")), whole)


@pytest.mark.slow
def test_run_whose_worker_node_and_driver_die_resumes_to_sequential(joined, tmp_path):
    node = joined.add_node(**NODE)
    (tmp_path / "node").write_text(node.node_id)
    data = ["plugins=[tests.train.engines.mortal]", f"data={{name: mortal, folder: {tmp_path}}}"]
    words = [*TINY, *data, "engine=ray", "checkpoint_every=1", f"output={tmp_path / 'run'}"]
    with subprocess.Popen([sys.executable, "-m", "train", "run", QUICKSTART, *words]) as driver:
        wait_until((tmp_path / "node reached").exists)
        joined.remove_node(node, allow_graceful=False)
        wait_until((tmp_path / "driver reached").exists)
        driver.kill()
    (tmp_path / "driver dead").touch()
    assert (tmp_path / "worker").exists()
    assert len(read(tmp_path / "run")) == 1
    resumed = run(tiny(tmp_path / "run", *data, "engine=ray", "checkpoint_every=1"), resume=True)
    assert_same(resumed, run(tiny(tmp_path / "sequential", *data)))
