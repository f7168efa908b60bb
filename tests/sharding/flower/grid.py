"""A grid of nodes in this process: a node's app runs when its reply is pulled."""

from weakref import ref

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from sharding.flower import evaluate_message, query_message, train_message


class StubGrid:
    """Nodes by number, with their configurations, that run one app.

    Attributes:
        settings: of the nodes that are there, by number.
        bend: what becomes of a node's replies, by node; they travel as they are elsewhere.
        pushed: (node, kind, keys of the content and of its configuration) of every message.
        most: the largest number of contents that were alive at once.
        states: what Flower keeps for each node.
    """

    def __init__(self, app, settings):
        self.app, self.settings, self.bend = app, dict(settings), {}
        self.pushed, self.alive, self.most = [], [], 0
        self.states, self._replies = {}, {}

    def get_node_ids(self):
        return list(self.settings)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            node = message.metadata.dst_node_id
            keys = {*message.content, *message.content.get("config", {})}
            self.pushed.append((node, message.metadata.message_type, keys))
            self._count(message.content)
            numbers.append(str(len(self.pushed)))
            message.metadata.__dict__["_message_id"] = numbers[-1]
            if node in self.settings:
                self._replies[numbers[-1]] = self._reply(node, message)
        return numbers

    def pull_messages(self, numbers):
        for number in list(numbers):
            if number in self._replies:
                # Not in memory of the server: the node's answer waits in Flower.
                reply = self._replies.pop(number)()
                if not reply.has_error():
                    self._count(reply.content)
                yield from self.bend.get(reply.metadata.src_node_id, lambda reply: [reply])(reply)

    def send_and_receive(self, messages, *, timeout=None):
        return list(self.pull_messages(self.push_messages(list(messages))))

    def _count(self, content):
        self.alive = [*(one for one in self.alive if one() is not None), ref(content)]
        self.most = max(self.most, len(self.alive))

    def _reply(self, node, message):
        context = Context(1, node, self.settings[node], self.states.setdefault(node, RecordDict()), {})
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


def make_app(structure, train, evaluate=None, keep_ratio=None, mods=()):
    """Return a client's app."""
    app = ClientApp()

    @app.query()
    def query(message, context):
        return query_message(message, context, keep_ratio)

    @app.train(mods=[*mods])
    def fit(message, context):
        return train_message(message, context, structure, lambda model, config: train(model, config, context))

    @app.evaluate()
    def test(message, context):
        return evaluate_message(message, context, structure, lambda model, config: evaluate(model, config, context))

    return app
