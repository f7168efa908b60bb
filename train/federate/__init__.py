"""The same algorithm across processes and machines, on Flower.

The server runs the rounds of `train.rounds` as any run does (`server`), with an engine that has each client trained by
the node that holds its data (`engine`, `nodes`). A node trains with the engine `sequential` (`node`). What travels
between them is a shard as `Shard.to_bytes` writes it, and a few plain values (`messages`). Where a sampler chooses
after training, an update stays with its node until it is heard (`reports`, `consult`, `vote`). `launch` starts all on
one machine.
"""

from importlib.util import find_spec

from sharding.errors import UserError

if find_spec("flwr") is None:
    raise UserError("federation needs the package flwr: pip install -e '.[flower]'")
