"""Which clients take part in a round."""

from sharding.clients.uniform import FullSampler, UniformSampler

SAMPLERS = {"uniform": UniformSampler, "full": FullSampler}

__all__ = ["SAMPLERS", "FullSampler", "UniformSampler"]
