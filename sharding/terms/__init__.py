"""Which terms a client receives: strategies, inclusion probabilities and designs."""
