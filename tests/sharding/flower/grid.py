"""A grid of nodes in this process, which makes each reply when it is pulled."""

from weakref import ref

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from sharding.flower import evaluate_message, query_message, train_message


class StubGrid:
    """Nodes by number, with their configurations.

    Attributes:
        pushed: (node, kind, keys of the content) of every message.
        most: the largest number of contents that were alive at once.
        silent: (node, kind) of messages that get no reply.
        states: what Flower keeps for each node.
    """

    def __init__(self, app, configs):
        self.app, self.configs, self.silent = app, dict(configs), set()
        self.pushed, self.alive, self.most = [], [], 0
        self.states, self._replies = {}, {}

    def get_node_ids(self):
        return list(self.configs)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            self.pushed.append((node, kind, sorted(message.content)))
            self._count(message.content)
            number = str(len(self.pushed))
            message.metadata.__dict__["_message_id"] = number
            if (node, kind) not in self.silent:
                self._replies[number] = self._answer(node, message)
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers):
        for number in list(numbers):
            if number in self._replies:
                # Not in memory of the server: the node's answer waits in Flower.
                reply = self._replies.pop(number)()
                if not reply.has_error():
                    self._count(reply.content)
                yield reply

    def _count(self, content):
        self.alive = [*(one for one in self.alive if one() is not None), ref(content)]
        self.most = max(self.most, len(self.alive))

    def _answer(self, node, message):
        context = Context(1, node, self.configs[node], self.states.setdefault(node, RecordDict()), {})
        data, kind, number = dict(message.content), message.metadata.message_type, message.metadata.message_id
        group = message.metadata.group_id

        def reply():
            asked = Message(RecordDict(data), dst_node_id=node, message_type=kind, group_id=group)
            asked.metadata.__dict__["_message_id"] = number
            server, TaskIdentity.node_id = TaskIdentity.node_id, node
            try:
                return self.app(asked, context)
            except Exception as error:  # as Flower's own process does
                return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=asked)
            finally:
                TaskIdentity.node_id = server
                data.clear()

        return reply


def make_app(structure, train, evaluate=None, keep_ratio=None):
    """Return a client's app."""
    app = ClientApp()

    @app.query()
    def query(message, context):
        return query_message(message, context, keep_ratio)

    @app.train()
    def fit(message, context):
        return train_message(message, context, structure, lambda model, config: train(model, config, context))

    @app.evaluate()
    def test(message, context):
        return evaluate_message(message, context, structure, lambda model, config: evaluate(model, config, context))

    return app
