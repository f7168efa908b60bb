"""Fine-tune a pretrained text encoder with the library: clients keep it in 4 bits, and train a few terms.

Needs `pip install transformers`. Run it with: python examples/finetune_minilm.py [WEIGHTS]

WEIGHTS is a folder, or an id on the Hugging Face hub; by default sentence-transformers/all-MiniLM-L6-v2 (90 MB).
"""

import sys

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from sharding import Frozen, Server, Shard, ShardPlanner, Update, factorize, init_empty, train_shard

HUB = "sentence-transformers/all-MiniLM-L6-v2"
SPACE = (
    *("the rocket reached orbit", "a probe landed on the moon", "astronauts repaired the station"),
    *("the telescope found a planet", "engines lifted the satellite", "the shuttle returned"),
)
SPORT = (
    *("the goalkeeper saved a penalty", "they won the cup after extra time", "a striker scored twice"),
    *("the coach changed the team", "fans cheered the final goal", "a late tackle, a red card"),
)
OTHERS = [
    ("a comet passed the earth", 0),
    ("the launch was delayed", 0),
    ("the league starts in may", 1),
    ("a goal", 1),
]
TEXTS = {
    client: [(text, label) for label, texts in enumerate((SPACE, SPORT)) for text in texts[start : start + 3]]
    for client, start in (("phone", 0), ("laptop", 3))
}


def freeze_embeddings(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze the embeddings: what is frozen is sent once."""
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            part.requires_grad_(False)
    return model


def main(weights: str) -> None:
    """Fine-tune for ten rounds."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    pretrained = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=2, dtype=torch.float32)

    def batch_of(samples: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
        texts, labels = zip(*samples, strict=True)
        return dict(tokenizer(list(texts), padding=True, return_tensors="pt")) | {"labels": torch.tensor(labels)}

    width = pretrained.config.hidden_size
    keep_ratios = {"phone": 4 / width, "laptop": 16 / width}  # 4 and 16 terms of each matrix
    model = factorize(freeze_embeddings(pretrained), max(keep_ratios.values()), residual_format="int4")
    print(model.factorize_report)
    server = Server(model, ShardPlanner("top_n"))
    once = server.frozen.to_bytes()
    print(f"first contact: {len(once) / 1e6:.1f} MB, which the clients keep")

    with init_empty():  # a client's structure, without values
        structure = freeze_embeddings(AutoModelForSequenceClassification.from_config(pretrained.config))
    frozen = Frozen.from_bytes(once)

    def train(client: str, shard: Shard) -> Update:
        received = Shard.from_bytes(shard.to_bytes())
        batches = [batch_of(TEXTS[client])] * 3
        adamw = lambda parameters: torch.optim.AdamW(parameters, lr=5e-4)  # noqa: E731
        return train_shard(structure, received, batches, make_optimizer=adamw, frozen=frozen)

    for client, ratio in keep_ratios.items():
        print(f"each round: {server.planner.nbytes(model, ratio) / 1e6:.2f} MB to the {client}, and as many back")
    for number in range(10):
        server.round(number, keep_ratios, train)

    server.model.eval()
    with torch.no_grad():
        batch = batch_of(OTHERS)
        right = (server.model(**batch).logits.argmax(1) == batch["labels"]).sum()
    print(f"right on {right} of {len(OTHERS)} other texts")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else HUB)
