"""PEFT's adapters over factorized layers, and adapters that are exported for PEFT."""

import pytest
import torch
from torch import nn

from sharding import UserError, factorize, merge

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("safe", [False, True])
def test_merging_an_adapter_over_a_factorized_base_is_refused_before_and_right_after_merge(safe):
    torch.manual_seed(0)
    net, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(3, 16)
    tuned = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["1", "2"], init_lora_weights=False))
    small, expected = factorize(tuned, 1.0), tuned(x)
    torch.testing.assert_close(small(x), expected)
    with pytest.raises(UserError, match=r"call sharding.merge\(model\) first"):
        small.merge_and_unload(safe_merge=safe)
    torch.testing.assert_close(merge(small).merge_and_unload(safe_merge=safe)(x), expected)
