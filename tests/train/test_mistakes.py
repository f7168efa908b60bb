"""Command lines that are wrong: each is refused in one line that names what to change, with exit code 2."""

import shlex
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from sharding import UserError
from tests.train.runs import REPOSITORY, refused
from train.config.schema import RUN_LEVEL_KEYS, Config, load_config
from train.config.values import Section, section_of

CONFIGS = REPOSITORY / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path):
    """An empty folder to work in, and no data elsewhere."""
    monkeypatch.delenv("SHARDING_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def kinds(annotation: Any) -> set[Any]:
    """Return the types of which a type is made."""
    return {annotation}.union(*map(kinds, get_args(annotation)))


def keys_of(kind: type, section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every key of a configuration whose value is, or holds, one of this type."""
    for name, info in section.model_fields.items():
        if (inner := section_of(section, name)) is not None:
            yield from keys_of(kind, inner, f"{prefix}{name}.")
        elif kind in kinds(info.annotation):
            yield prefix + name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in keys_of(bool) for value in ("1", "0", "'yes'")),
        *((key, value) for key in sorted({*keys_of(int), *keys_of(float)}) for value in ("true", "much", ".nan")),
        *((key, ".inf") for key in keys_of(float) if key != "local.clip"),
    ],
)
def test_config_with_invalid_numbers_or_flags_raises(key, value):
    with pytest.raises(UserError, match=rf"{key}[.=]"):
        load_config(QUICKSTART, [f"{key}={value}"])


# An override of the quickstart; after the arrow what the error must name besides its key.
OVERRIDES = """
name=
name=''
name=../../x
name=a/b
name=.hidden
name="a\\0b"
name="a\\nb"
name=7
name.first=3 → name=
output=''
output=' '
output="/tmp/a\\0b"
output="a\\nb"
output=~nosuchuser/x
data={name: mnist, root: ~nosuchuser/x} → data.root
data.name=[mnist, digits] → data.name=
data={name: mnist, root: "a\\0b"} → data.root
rounds=0
rounds=1e400
rounds=2020-13-45
rounds=[ → YAML
rounds=!!python/object/apply:os.system [true] → YAML
rounds → dotted.key=value
=3
a.b.c=3 → 'a'
xyzzy=1 → docs/reference/configuration.md
roundz=1 → 'rounds'
lr=0.1 → 'local.optimizer.lr'
data.range=3 → data.range: digits has no option
local.clipp=1 → 'local.clip'
local.clipp=1 → keys of local: epochs, steps
clients.keep_ratios=1 → 'keep_ratio'
clients.a=1
local=3
tasks=3
model=mpl → 'mlp'
model=[mlp]
model={width: 8, name: [1]} → model.name
model={name: mlp, name: cnn} → "name"
strategy=colective → 'collective'
strategy=[top_n]
design=cpss → 'cps'
engine=fast → sequential
engine=[]
device=cudda
device=meta
device=cuda:99
compression=float3 → 'float32'
init=low
server_optimizer=plan → 'plain'
server_optimizer={name: plain, momentum: 0.5} → plain has no option 'momentum'
server_optimizer.lr=.inf
local.clip=0.5
keep_ratio=0
keep_ratio=-0.1
keep_ratio=1.01
keep_ratio=[0.2]
keep_ratio={}
keep_ratio={2: 1}
keep_ratio={true: 1}
keep_ratio={0.2: true}
keep_ratio={0.2: .nan}
keep_ratio={0.2: 0.5} → 0.5, not 1
keep_ratio={0.2: 0.5, 0.2: 0.5} → duplicate key
keep_ratio={0.2:0.7} → 'keep_ratio.0.2:0.7': YAML needs a space after the colon, as in {0.2: 0.5}
keep_ratio={1:1} → 'keep_ratio.1:1': YAML needs a space
model={name: mlp, hidden:8} → 'model.hidden:8': YAML needs a space
model={name: mlp, hidden: 64} → model.hidden=64: a list is needed, as model.hidden=[…]
data:root=x → unknown config key 'data:root'
model=resnet18 → 'resnet18_gn'
model.widht=3 → 'width'
model.width=true
model.width=abc
model.width=1000000000 → cannot be built
model.groups=3 → model=resnet18_gn: groups=3 does not divide width=
data=cifar → 'cifar10'
data.partition=dirichlett → 'dirichlet'
data.partition=pachinko → superclasses
data.partition=natural → natural needs
data.noise=1 → digits has no option 'noise'; its options: none
data.root=/nonexistent → digits has no option 'root'
local.schedule.rate=1 → cosine has no option 'rate'
data.partition.share=0.2 → 'share'
clients.count=0
clients.count=1.5
clients.count=2000 → 1437
clients.count=10000000000
clients.per_round=0
clients.per_round=21 → 20
clients.sampler=uniformly → 'uniform'
clients.sampler=ocs → 'budget'
clients.sampler={name: ocs, budget: 99} → clients.sampler=ocs: budget is 99
clients.sampler=mmfl → tasks
clients.sampler=wireless → network.bandwidth
clients.sampler.budget=2 → uniform has no option 'budget'
clients.pilot_losses=1.5 → clients.pilot_losses=[…]
clients.pilot_losses=[1.5] → with uniform set clients.pilot_losses=[]
network.bandwidth=0
network.bandwidth=-1
network.bandwidth=1e-320
network.compute=2 → network.bandwidth
aggregation.max_share=0
aggregation.max_share=1.5
local.epochs=100000000000000000000
local.precision=float16
local.loss=smothed → smothed
local.schedule=cosin → 'cosine'
local.optimizer.a=1 → 'a'
local.optimizer.momentum=-1 → local.optimizer=sgd: Invalid momentum
local.optimizer={name: sgd, fused: true, foreach: true} → local.optimizer=sgd: `fused` and `foreach`
local.optimizer={name: rmsprop, capturable: true} → local.optimizer=rmsprop: If capturable=True
server_optimizer={name: sgd, lr: -1} → server_optimizer=sgd: Invalid learning rate
server_optimizer={name: sgd, lr: 1, fused: true, foreach: true} → server_optimizer=sgd: `fused` and `foreach`
server_optimizer={name: adam, capturable: true} → server_optimizer=adam: If capturable=True
target_loss=0.4 → evaluate_training=true
plugins=[no_such_module] → no_such_module
plugins=5 → plugins=[…]
tracker=mine → wandb
tracker={name: wandb, mode: of} → offline
tracker={name: wandb, mode: on} → tracker.0.mode='on'
"""
LONG = {
    "name=" + "x" * 300: "name",
    "output=" + "x" * 300: "output",
    "output=" + "x/" * 3000: "output",
    "data={name: mnist, root: " + "x" * 300 + "}": "data.root",
    "rounds=" + "9" * 400: "rounds",
    "rounds=" + "9" * 5000: "YAML",
    "strategy=" + "x" * 100_000: "choose one of",
}


CASES = {line: line.partition(" → ")[::2] for line in OVERRIDES.strip().splitlines()}
CASES |= {f"{override[:20]}{len(override)}": (override, named) for override, named in LONG.items()}


@pytest.mark.parametrize(("override", "named"), CASES.values(), ids=CASES)
def test_run_with_an_invalid_value_prints_one_line(capsys, override, named):
    refused(capsys, ["run", QUICKSTART, override], named or override.partition("=")[0])


MMFL = ["clients.sampler=mmfl", "clients.sampler.budget=2"]
TASKS = {
    **{f"{{{name}: {{}}, b: {{}}}}": f"'{name}'" for name in ("forward", "keys", "training", "T_destination")},
    **{f"{{a: {{{key}: 3}}}}": f"tasks.a.{key}" for key in RUN_LEVEL_KEYS},
    "{}": "clients.sampler=mmfl",
    "{'': {}}": "''",
    "{a b: {}}": "'a b'",
    "{a.b: {}}": "'a.b'",
    "{a: 3}": "tasks.a=3",
    "{a: {}, a: {}}": '"a"',
    "{a: {roundz: 3}}": "'roundz'",
    "{a: {local: {clip: 0}}}": "tasks.a: local.clip=0",
    "{a: {strategy: none}}": "'none'",
    "{a: {server_optimizer: [1]}}": "server_optimizer=[1]",
    "{a: {local: {lr: .inf}}}": "local.optimizer.lr",
    "{a: {seed: true}}": "seed",
    "{a: {device: meta}}": "'meta'",
    "{a: {model: {widht: 3}}}": "'width'",
}


@pytest.mark.parametrize(("tasks", "named"), TASKS.items(), ids=TASKS.keys())
def test_run_with_invalid_tasks_prints_one_line(capsys, tasks, named):
    refused(capsys, ["run", QUICKSTART, *MMFL, f"tasks={tasks}"], named)


# A command line, in which CONFIG is the quickstart, CONFIGS its folder; after the arrow what the error must name.
COMMANDS = """
 → COMMAND
rnu CONFIG → 'rnu'
run → CONFIG
run CONFIGS/quickstrat.yaml → quickstart.yaml
run nowhere.yaml → nowhere.yaml
run . → '.'
run CONFIG --resme → '--resme'
run CONFIG --nonsense=1 → nonsense
run CONFIG --rounds 3 → key=value
run CONFIG --import no_such_module → 'no_such_module'
run CONFIG local.optimizer.lr=1 local.optimizer.lr=2 → 'local.optimizer.lr=1' and 'local.optimizer.lr=2'
run CONFIG rounds=0 local.epochs=-1 → rounds=0
run CONFIG rounds=0 local.epochs=-1 → local.epochs=-1
run CONFIG strategy=top_n design=brewer → design=brewer does nothing where strategy=top_n
run CONFIG data.partition=two_sizes data.partition.classes=-3 → classes=-3
run CONFIG clients.sampler=wireless network.bandwidth=1 network.compute=0 network.communicate=0 → times above 0
run CONFIG 'tasks={a: {}}' → clients.sampler=mmfl
run CONFIG clients.sampler=mmfl clients.sampler.budget=2 clients.sampler.signal=los 'tasks={a: {}}' → 'los'
run CONFIG clients.sampler=mmfl clients.sampler.budget=2 alignment=true 'tasks={a: {}}' → alignment=true
run CONFIG clients.sampler=mmfl clients.sampler.budget=2 clients.pilot_losses=[2] 'tasks={a: {}}' → with mmfl
run CONFIGS/cifar10_small.yaml data.root=/nowhere → /nowhere
run CONFIGS/cifar10_small.yaml data.root=null → data.root
run CONFIGS/tiny_imagenet_cct.yaml data.root=. data.download=true → cannot fetch
config CONFIG model.widht=3 → 'width'
inspect CONFIG rounds=0 → rounds=0
inspect CONFIG model.width=abc → model.width='abc'
compare CONFIG → --strategies
compare CONFIG --strategies , → --strategies
compare CONFIG --strategies prsm → 'prism'
compare CONFIG --strategies dense model.width=abc → model.width='abc'
compare CONFIG --strategies top_n --seeds a,b → 'a'
compare CONFIG --strategies top_n --seeds '' → --seeds
compare CONFIG --strategies top_n --seeds 1, → --seeds
compare CONFIG --strategies top_n --jobs x → 'x'
compare CONFIG --strategies top_n --jobs 0 → --jobs
compare CONFIG --grid local.optimizer.lr → key=value,value
compare CONFIG --grid threads=1,2 → threads
compare CONFIG --grid strategy=dense --strategies top_n → --strategies
compare CONFIG strategy=dense --strategies top_n → 'strategy'
compare CONFIG seed=1 --seeds 0 --grid strategy=dense → --seeds
compare CONFIG local.optimizer.lr=1 --grid local.optimizer.lr=1,2 → 'local.optimizer.lr=1,2'
table 9 → '9'
table 1 --scale huge → 'huge'
table 1 --only nothing_such → nothing_such
table 1 --output CONFIG → --output
table 1 --output '' → path
table 1 strategy=dense → strategy
table 1 seed=5 → --seeds
report nowhere → nowhere
report CONFIGS → no run
report CONFIGS --output x.html no-such-folder → no-such-folder
list words → unknown argument 'words'
report CONFIGS --targets 0.8,800 → '800'
report CONFIGS --targets most → 'most'
"""


@pytest.mark.parametrize("line", COMMANDS.strip("\n").splitlines())
def test_command_with_invalid_arguments_prints_one_line(capsys, line):
    command, _, named = line.partition(" → ")
    words = shlex.split(command.replace("CONFIGS", str(CONFIGS)).replace("CONFIG", QUICKSTART))
    refused(capsys, words, named)


def test_command_with_too_long_arguments_prints_one_line(capsys):
    refused(capsys, ["run", QUICKSTART, "--" + "x" * 5000], "unknown option")
    refused(capsys, ["run", "x" * 300], "File name too long")
    refused(capsys, ["run", "a\0b"], "cannot read the config")
    refused(capsys, ["table", "1", "--output", "x" * 300], "a shorter path is needed")
