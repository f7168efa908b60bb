"""How alike the clients of a partition are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Concentration:
    """How alike the clients are; each scheme uses what it knows.

    Attributes:
        alpha: of `dirichlet` and of the superclasses in `pachinko` (small: few classes a client); exponent of
            `power_law` (0: equal sizes).
        fine_alpha: of the classes within a superclass in `pachinko`.
        per_class: `pachinko` takes its two numbers as the parameter of every class, not as their total.
    """

    alpha: float = 1.0
    fine_alpha: float = 10.0
    per_class: bool = False
