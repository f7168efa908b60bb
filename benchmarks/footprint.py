"""How much of the library one plain round enters: files and functions, a measure of what a reader has to follow.

`python benchmarks/footprint.py` counts them for a three-layer MLP and two clients, one of which fails. Functions are
counted without generator expressions, comprehensions and lambdas, and with them.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

import sharding
from sharding import Server, ShardPlanner, init_empty, train_shard

PACKAGE = str(Path(sharding.__file__).parent)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def one_round() -> set[CodeType]:
    """Run a round and return the code objects of the library that it entered."""
    entered = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add(frame.f_code)

    model = make_model()
    with init_empty():
        structure = make_model()
    batches = [(torch.randn(100, 64), torch.randint(10, (100,))) for _ in range(2)]

    def train(client, shard):
        return train_shard(structure, shard, batches, lr=0.1) if client == "phone" else None

    server = Server(model, ShardPlanner("collective"))
    sys.setprofile(note)
    try:
        server.round(0, {"phone": 0.1, "laptop": 0.25}, train)
    finally:
        sys.setprofile(None)
    return entered


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    codes = one_round()
    named = [code for code in codes if not code.co_name.startswith("<")]
    for what, chosen in (("named functions", named), ("with generator expressions and lambdas", codes)):
        print(f"{len({code.co_filename for code in chosen})} files, {len(chosen)} functions: {what}")
