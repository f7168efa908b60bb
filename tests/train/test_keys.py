"""Each key of the configuration, changed alone, changes the run, its files or its refusal; or is documented not to."""

import re

import pytest

from sharding import UserError
from tests.train.runs import QUICKSTART, without_times
from train.callbacks import Callback
from train.config.messages import keys_of
from train.config.naming import keys_and_options
from train.config.schema import Config, load_config
from train.config.unread import refuse_unread
from train.registries import LOSSES, TRACKERS, cross_entropy
from train.run import run
from train.rundir.file_names import CONFIG_FILE, PROVENANCE_FILE
from train.utils.errors import RunError
from train.utils.jsonl import read_lines

SHARED = [
    *("rounds=2", "clients.count=4", "clients.per_round=3", "local.epochs=1", "evaluate_every=1", "engine=sequential"),
    *("model={name: mlp, hidden: [16, 64, 16]}", "data={name: synthetic, clients: 4, samples: 200}"),
    *("data.partition=natural", "local.optimizer.lr=0.1"),
]
BASES: dict[str, list[str]] = {
    "drawn": [
        *("strategy=collective", "network.bandwidth=1000", "evaluate_training=true", "init=as_built", "local.decay=5")
    ],
    "uneven": ["keep_ratio={0.2: 0.5, 0.7: 0.5}", "strategy=top_n", "local.steps=2", "residual=int8", "local.decay=5"],
    "private": [
        *("strategy=dense", "clients.sampler=poisson", "server_optimizer=fedadam", "result=last"),
        "privacy={clipping_norm: 1.0, noise_multiplier: 0.05, delta: 1e-3, secret_seed: 1}",
    ],
}
CHANGES = """
name=other seed=3 data_seed=3 rounds=1 target_accuracy=0.01 target_loss=100 strategy=unbiased design=brewer
keep_ratio=0.5 skip=[] compression=bfloat16 init=as_built init=low_rank residual=int4 tail=int8
model.name=cnn model.weights=no.safetensors model.hidden=[8,64,8]
data.name=digits data.beta=2 data.clients=5 data.samples=400 data.seed=1 data.partition.name=iid data.holdout=5
clients.count=3 clients.per_round=2 clients.sampler.name=weighted clients.sampler.replacement=true
clients.pilot_losses=[1.0] network.bandwidth=500 network.compute=2 network.communicate=[1,2]
local.epochs=3 local.steps=3 local.batch_size=5 local.optimizer.name=rmsprop local.optimizer.lr=0.3
local.optimizer.momentum=0.3 local.optimizer.dampening=0.3 local.optimizer.weight_decay=0.3
local.optimizer.nesterov=true local.optimizer.maximize=true local.schedule.name=constant local.clip=3
local.decay=0.1 local.decay_of=effective local.loss=doubled local.precision=bfloat16
server_optimizer.name=plain server_optimizer.lr=0.3 server_optimizer.momentum=0.3
server_optimizer.betas=[0.5,0.5] server_optimizer.eps=0.5 result=last result=average
aggregation.max_share=0.35 tasks={"a":{"seed":1}}
privacy.clipping_norm=0.1 privacy.noise_multiplier=2 privacy.delta=1e-4 privacy.max_epsilon=0.01 privacy.secret_seed=2
local.checkpoint=true evaluate_every=2 evaluate_training=true evaluate_training=false alignment=true checkpoint_every=1
"""
SAME = "plugins=[json] engine=lanes device=cpu tracker.name=silent data.alpha=2"  # documented to change nothing
# A path; what rounds differently; and torch's choices between implementations.
UNTRIED = {"output", "threads", "local.compile"}
UNTRIED |= {f"local.optimizer.{option}" for option in ("foreach", "fused", "differentiable")}


def keys():
    """Yield each base with each of its keys that holds a value."""
    for base, overrides in BASES.items():
        found = {*keys_of(Config), *keys_and_options(load_config(QUICKSTART, [*SHARED, *overrides]))}
        yield from ((base, key) for key in sorted(found) if not any(other.startswith(f"{key}.") for other in found))


def outcome(directory, overrides):
    """Return what a run writes, without times, or its refusal or warning."""
    try:
        config = load_config(QUICKSTART, [*SHARED, *overrides, f"output={directory}"])
        refuse_unread([config], overrides[-1:])
        run(config)
    except (UserError, RunError, UserWarning) as refusal:
        return str(refusal)
    files = {}
    for path in directory.rglob("*"):
        if path.suffix == ".jsonl":
            files[path.name] = without_times(read_lines(path))
        elif path.is_file() and path.name not in (CONFIG_FILE, PROVENANCE_FILE):
            files[path.name] = path.read_bytes()
    return files


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """What the runs of the bases write."""
    return {base: outcome(tmp_path_factory.mktemp(base) / "run", overrides) for base, overrides in BASES.items()}


@pytest.mark.parametrize(("base", "key"), [pair for pair in keys() if pair[1] not in UNTRIED])
def test_a_key_changes_a_run_or_is_documented_not_to(base, key, wholes, tmp_path, monkeypatch):
    monkeypatch.setitem(LOSSES, "doubled", lambda *arguments: 2 * cross_entropy(*arguments))
    monkeypatch.setitem(TRACKERS, "silent", lambda config: Callback())
    monkeypatch.setattr("os.fsync", lambda file: None)  # which takes a third of the time
    assert isinstance(wholes[base], dict)
    changes = re.findall(rf"(?<!\S){re.escape(key)}=\S+", f"{CHANGES} {SAME}")
    assert changes, f"add a value of {key} that changes a run"
    found = (outcome(tmp_path / str(n), [*BASES[base], change]) for n, change in enumerate(changes))
    assert any(one != wholes[base] for one in found) == (changes[0] not in SAME)
