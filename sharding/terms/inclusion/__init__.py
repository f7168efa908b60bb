"""Inclusion probabilities: how likely each singular term (or client) is to be drawn. One result per file."""

from sharding.terms.inclusion.collective import collective_inclusion
from sharding.terms.inclusion.optimal import optimal_inclusion
from sharding.terms.inclusion.schatten import schatten_inclusion
from sharding.terms.inclusion.successive import successive_inclusion

__all__ = [
    "collective_inclusion",
    "optimal_inclusion",
    "schatten_inclusion",
    "successive_inclusion",
]
