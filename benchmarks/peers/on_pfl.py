"""The workload on pfl-research's simulated backend. Run by benchmarks/peers.py."""

import types

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F
from workload import BATCH, COHORT, EPOCHS, LR, ROUNDS, USERS, Stopwatch, network, no_arguments, user_data

watch = Stopwatch()


class Laps(TrainingProcessCallback):
    """Records the end of each round."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Record the time."""
        watch.lap()
        return False, Metrics()


def loss(self, inputs, targets, eval=False):
    self.eval() if eval else self.train()
    return F.cross_entropy(self(inputs), targets)


@torch.no_grad()
def metrics(self, inputs, targets, eval=True):
    return {"loss": Weighted(self.loss(inputs, targets, eval=eval).item() * len(targets), len(targets))}


def main() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - pfl uses it
    module = network()
    module.loss, module.metrics = types.MethodType(loss, module), types.MethodType(metrics, module)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(user_data(user), user_id=str(user)),
        get_user_sampler("minimize_reuse", list(range(USERS))),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS + 1, evaluation_frequency=10**6, train_cohort_size=COHORT, val_cohort_size=0
        ),
        SimulatedBackend(users, users, [WeightByUser()]),
        model,
        NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=None),
        [Laps()],
    )
    watch.report("pfl")


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
