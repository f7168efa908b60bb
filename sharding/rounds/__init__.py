"""One round: the server plans and cuts shards, clients train them, the server averages and steps."""
