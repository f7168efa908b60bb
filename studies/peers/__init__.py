"""Other methods of federated fine-tuning, trained by the same clients as ours."""
