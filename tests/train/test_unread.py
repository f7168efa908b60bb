"""A key of the command line that no run reads is refused in one line."""

import pytest

from sharding import UserError
from tests.train.runs import QUICKSTART
from train.cli.sweep import grid_configs
from train.config.schema import load_config
from train.config.unread import refuse_unread


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["strategy=top_n", "design=brewer"], "strategy=top_n; remove it, or use it with strategy=unbiased, "),
        (["strategy=prism", "design=brewer"], "strategy=prism; "),
        (["strategy=dense", "keep_ratio=0.3"], "strategy=dense; remove it, or use it with strategy=top_n, "),
        (["strategy=full", "keep_ratio=0.3"], "strategy=full; "),
        (["strategy=dense", "init=as_built"], "strategy=dense; "),
        (["strategy=unbiased", "tail=int8"], "strategy=unbiased; remove it, or use it with strategy=top_n"),
        (["strategy=top_n", "local.clip=3"], "strategy=top_n; "),
        *((["strategy=dense", f"{key}"], "strategy=dense; ") for key in ("skip=[]", "local.decay=1")),
        (["strategy=dense", "local.decay_of=effective"], "strategy=dense; remove it, or use it with strategy=top_n, "),
        (["local.decay=0", "local.decay_of=effective"], "local.decay=0; remove it"),
        (["local.steps=2", "local.epochs=3"], "local.steps=2; remove one of them"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(overrides, reason):
    with pytest.raises(UserError) as refused:
        refuse_unread([load_config(QUICKSTART, overrides)], overrides)
    assert f"{overrides[-1]} does nothing where {reason}" in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        *(["strategy=unbiased", "design=brewer"], ["strategy=collective", "local.clip=3"], ["keep_ratio=0.3"]),
        *(["strategy=dense", "tail=null"], ["strategy=top_n", "local.clip=.inf"], ["strategy=top_n", "tail=int8"]),
    ],
)
def test_a_key_that_is_read_or_turns_something_off_is_not(overrides):
    refuse_unread([load_config(QUICKSTART, overrides)], overrides)


def test_a_key_that_one_run_of_a_comparison_reads_is_not_refused():
    assert len(grid_configs(QUICKSTART, ["keep_ratio=0.3"], ["collective", "dense"], None)) == 2
    with pytest.raises(UserError, match="design=brewer does nothing"):
        grid_configs(QUICKSTART, ["design=brewer"], ["top_n", "dense"], None)
