"""Small models of published architectures, with random weights: name -> (model, inputs, share of weights covered).

Widths and depths are the least that keep what is particular to each: grouped and depthwise convolutions, fused and
packed attention, tied weights, standardized convolutions, experts, recurrence.
"""

from typing import Any

TIMM: dict[str, tuple[dict[str, Any], float]] = {
    "resnet18": ({}, 0.0),
}
