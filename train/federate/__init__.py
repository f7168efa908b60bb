"""The same algorithm across processes and machines, on Flower.

The server runs the rounds of `train.rounds` as any run does (`server_app`, `server`), with an engine that has each
client trained by the node that holds its data (`nodes_engine`); who is there, it knows by the `roster`. A node trains
with the engine `sequential` (`client_app`). What travels between them is a shard as `Shard.to_bytes` writes it, and a
few plain values (`messages`). With a sampler that chooses after training, an update stays with its node until the
server asks for it. `launch` starts all on one machine, by `keys` and `supervisor`.
"""

from importlib.util import find_spec

from sharding.errors import UserError

if find_spec("flwr") is None:
    raise UserError("federation needs the package flwr: pip install -e '.[flower]'")
