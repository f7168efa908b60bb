"""The same rounds across processes and machines, on Flower.

The server runs `train.rounds` (`server_app`) with an engine that lets the node with a client's data train its shard
(`nodes_engine`); the `roster` knows which nodes are connected. A node trains with the engine `sequential`
(`client_app`). Shards travel as `Shard.to_bytes` writes them, with a few plain values (`messages`). With a sampler
that selects after training, an update stays with its node until the server asks for it.
"""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ImportError("federation needs the package flwr: pip install -e '.[federate]'")
