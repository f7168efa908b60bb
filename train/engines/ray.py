"""Train the cohort as tasks on a Ray cluster, which schedules them and repeats those that it loses.

Each client's samples go to Ray's object store when the client is first selected, and what the clients of a round share
goes there once a round.
"""

import logging
import os
import warnings
from dataclasses import replace
from functools import cache
from pickle import PicklingError
from typing import Any

import torch

from sharding import Plan, Shard, Update
from sharding.errors import UserError
from sharding.rounds.plan import Client
from train.data import Split
from train.engines.engine import Engine, Job, Replies
from train.engines.processes import UNSENDABLE
from train.engines.sequential import SequentialEngine
from train.engines.workers import AHEAD, Encoded, Result, train_client, train_in_order
from train.registries import import_parts
from train.utils.errors import REMEDY, RunError

log = logging.getLogger(__name__)


class RayEngine(Engine):
    """Trains each client as a Ray task on one core, or on one GPU where the job is on a GPU.

    Raise an ImportError if Ray is not installed, a UserError if no cluster is there or the job cannot be sent to it.
    """

    def __init__(self, job: Job) -> None:
        self._ray, self._job, self._samples = connect(), job, dict[Client, Any]()
        self._resource = "GPU" if job.device.type == "cuda" else "CPU"
        gpus = 1 if self._resource == "GPU" else 0
        self._task = self._ray.remote(_train).options(num_cpus=1, num_gpus=gpus)
        # The dataset prepares and augments samples, but holds none.
        shared = replace(job, clients={}, dataset=job.dataset.without_samples()).to("cpu")
        try:
            self._sent = self._ray.put(shared)
        except (AttributeError, TypeError, PicklingError, RuntimeError) as error:
            raise UserError(UNSENDABLE.format(error)) from error
        if not self._slots():
            log.warning("the Ray cluster has no %s yet: the run waits until a node with one joins", self._resource)

    def train(self, plan: Plan, round: int, lr: float) -> Replies:
        """Yield the clients' replies in the order of the plan.

        Raise a RunError if the cluster is lost, or a task failed as often as Ray repeats it.
        """

        def share(common: Shard) -> Any:
            return self._ray.put(common.to_bytes())

        def send(client: Client, terms: Shard, common: Any) -> Any:
            samples = self._samples_of(client)
            return self._task.remote([self._sent], client, samples, terms.to_bytes(), common, round, lr)

        def wait(task: Any) -> Result:
            data, loss, failure = self._ray.get(task)
            return None if data is None else Update.from_bytes(data), loss, failure

        ahead = AHEAD * max(1, self._slots())  # more than there are slots, so that nodes that join have work
        try:
            for client, reply in train_in_order(plan, self._job.device, ahead, share, send, wait):
                if reply.failure is not None:  # the worker's own log stays on its node
                    log.warning("client %s failed in round %d: %s", client, round, reply.failure)
                yield client, reply
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            first, *_ = str(cause).splitlines() or [""]
            raise RunError(f"Ray failed to train a client ({type(cause).__name__}: {first}); {REMEDY}") from error

    def close(self) -> None:
        """Release the samples in the object store; the cluster keeps running."""
        self._samples.clear()
        self._sent = None

    def _slots(self) -> int:
        """Return how many clients the nodes of the cluster can train at once, at present."""
        return int(self._ray.cluster_resources().get(self._resource, 0))

    def _samples_of(self, client: Client) -> Any:
        if client not in self._samples:
            data = self._job.clients[client]
            # Copies, because a slice is pickled with the whole tensor that it belongs to.
            self._samples[client] = self._ray.put(Split(data.inputs.cpu().clone(), data.targets.cpu().clone()))
        return self._samples[client]


def connect() -> Any:
    """Return the module `ray`, connected to the cluster of this machine, or of the variable RAY_ADDRESS.

    Raise an ImportError if Ray is not installed, a UserError if no cluster is there.
    """
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else Ray looks 12 minutes for a cluster that died
    try:
        import ray  # noqa: PLC0415  # an extra, imported where used
    except ImportError as error:
        raise ImportError("engine=ray needs the package ray: pip install -e '.[ray]'") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own future
        try:
            ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError) as error:
            raise UserError(
                f"engine=ray finds no Ray cluster ({str(error).splitlines()[0]}): start one with `ray start --head`, "
                "set RAY_ADDRESS=HOST:PORT, or use engine=processes"
            ) from error
    return ray


@cache
def _engine(sent: Any) -> SequentialEngine:
    """Return a worker's engine of one job, made at the first of its tasks: in one thread, on the task's GPU."""
    import ray  # noqa: PLC0415  # an extra, imported where used

    torch.set_num_threads(1)
    job = ray.get(sent)
    import_parts(job.plugins)
    return SequentialEngine(job.to("cuda" if ray.get_gpu_ids() else "cpu"))


def _train(sent: list[Any], client: Client, data: Split, terms: bytes, common: bytes, round: int, lr: float) -> Encoded:
    """Train a client in a worker. The job comes in a list, since Ray would read it anew for each task otherwise."""
    engine = _engine(sent[0])
    engine.job = replace(engine.job, clients={client: data.to(engine.job.device)})
    update, loss, failure = train_client(engine, client, Shard.from_bytes(terms), Shard.from_bytes(common), round, lr)
    return None if update is None else update.to_bytes(), loss, failure
