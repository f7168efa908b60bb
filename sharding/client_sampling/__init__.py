"""Samplers of the clients that take part in a round."""

from sharding.client_sampling.aocs import aocs_probabilities, plain_sum
from sharding.client_sampling.mmfl import TaskSampler, mmfl_probabilities
from sharding.client_sampling.network import Profiles, round_time
from sharding.client_sampling.optimal import (
    OptimalSampler,
    PartialOptimalSampler,
    SecureOptimalSampler,
    improvement_factors,
)
from sharding.client_sampling.sampler import Participation, Population, Sampler
from sharding.client_sampling.timed import StatisticalSampler, WirelessSampler
from sharding.client_sampling.uniform import (
    PoissonSampler,
    UniformSampler,
    UniformScaledSampler,
    UniformUploadSampler,
    WeightedSampler,
)
from sharding.client_sampling.wireless import (
    estimate_beta_over_alpha,
    statistical_probabilities,
    wireless_probabilities,
)

SAMPLERS: dict[str, type[Sampler]] = {
    sampler.name: sampler
    for sampler in (
        UniformSampler,
        PoissonSampler,
        WeightedSampler,
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
    "Participation",
    "PoissonSampler",
    "Population",
    "Profiles",
    "Sampler",
    "StatisticalSampler",
    "TaskSampler",
    "UniformSampler",
    "WirelessSampler",
    "aocs_probabilities",
    "estimate_beta_over_alpha",
    "improvement_factors",
    "mmfl_probabilities",
    "plain_sum",
    "round_time",
    "statistical_probabilities",
    "wireless_probabilities",
]
