"""Which clients take part in a round."""

from sharding.clients.aocs import SecureSum, aocs_probabilities, plain_sum
from sharding.clients.base import Heard, Population, Sampler
from sharding.clients.factors import improvement_factors
from sharding.clients.mmfl import mmfl_probabilities
from sharding.clients.network import Profiles, expected_round_time, round_time
from sharding.clients.optimal import OptimalSampler, PartialOptimalSampler, SecureOptimalSampler
from sharding.clients.tasks import TaskSampler
from sharding.clients.timed import StatisticalSampler, WirelessSampler
from sharding.clients.uniform import (
    FullSampler,
    UniformSampler,
    UniformScaledSampler,
    UniformUploadSampler,
    WeightedSampler,
)
from sharding.clients.wireless import (
    estimate_beta_over_alpha,
    estimates_by_loss,
    statistical_probabilities,
    wireless_probabilities,
)

SAMPLERS: dict[str, type[Sampler]] = {
    sampler.name: sampler
    for sampler in (
        UniformSampler,
        WeightedSampler,
        FullSampler,
        UniformScaledSampler,
        UniformUploadSampler,
        OptimalSampler,
        SecureOptimalSampler,
        PartialOptimalSampler,
        TaskSampler,
        WirelessSampler,
        StatisticalSampler,
    )
}

__all__ = [
    "SAMPLERS",
    "FullSampler",
    "Heard",
    "OptimalSampler",
    "PartialOptimalSampler",
    "Population",
    "Profiles",
    "Sampler",
    "SecureOptimalSampler",
    "SecureSum",
    "StatisticalSampler",
    "TaskSampler",
    "UniformSampler",
    "UniformScaledSampler",
    "UniformUploadSampler",
    "WeightedSampler",
    "WirelessSampler",
    "aocs_probabilities",
    "estimate_beta_over_alpha",
    "estimates_by_loss",
    "expected_round_time",
    "improvement_factors",
    "mmfl_probabilities",
    "plain_sum",
    "round_time",
    "statistical_probabilities",
    "wireless_probabilities",
]
