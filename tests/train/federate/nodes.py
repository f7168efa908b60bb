"""Nodes without processes: a grid that runs the nodes' app."""

from flwr.proto.node_pb2 import NodeInfo

from tests.sharding.flower.grid import StubGrid
from train.federate import client_app


class Nodes(StubGrid):
    """Nodes by number, with their configurations.

    Attributes:
        sent: all messages that the server has sent.
        keys: the public keys of nodes that have one.
    """

    def __init__(self, settings):
        super().__init__(client_app.app, settings)
        self.sent, self.keys = [], {}

    def get_nodes(self):
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.get_node_ids()]

    def push_messages(self, messages):
        messages = list(messages)
        self.sent += messages
        return super().push_messages(messages)

    def pull_messages(self, numbers):
        return super().pull_messages(reversed(list(numbers)))  # in no order that the server could count on
