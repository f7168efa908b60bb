"""Truncate a pretrained text encoder by its weights, by its activations, and on top of a frozen residual.

The encoder turns documents of 20 Newsgroups into mean-pooled features. For each truncation it reports the relative
error of the features of test documents, and the test accuracy of a logistic regression on features. Nothing is
fine-tuned. The calibration documents are training documents, without their labels.

    SHARDING_DATA=FOLDER python benchmarks/calibration.py [--train 800] [--test 600] [--calibration 128] [--tokens 48]

FOLDER holds `minilm/` (all-MiniLM-L6-v2 in Hugging Face's layout) and `newsgroups20/` (`train.parquet`,
`test.parquet`, with the columns `text` and `label`). Writes results/calibration/calibration.csv.
"""

import argparse
import csv
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library

from sharding import factorize

Batch = dict[str, Tensor]
BATCH = 16


def load_documents(folder: Path, split: str, count: int, tokens: int) -> tuple[list[Batch], np.ndarray]:
    """Return the first documents of each class in turn, tokenized in batches of similar length, and their labels."""
    import pandas as pd  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    table = pd.read_parquet(folder / "newsgroups20" / f"{split}.parquet")
    table = table.assign(turn=table.groupby("label").cumcount()).sort_values(["turn", "label"], kind="stable")[:count]
    tokenizer = AutoTokenizer.from_pretrained(folder / "minilm")
    batches = [
        dict(tokenizer(texts, truncation=True, max_length=tokens, padding=True, return_tensors="pt"))
        for texts in (table["text"].tolist()[start : start + BATCH] for start in range(0, len(table), BATCH))
    ]
    return batches, table["label"].to_numpy()


@torch.no_grad()
def features_of(model: nn.Module, batches: list[Batch]) -> np.ndarray:
    """Return the mean over each document's tokens of the last layer."""
    means = []
    for batch in batches:
        mask = batch["attention_mask"][..., None]
        means.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(means).numpy()


def accuracy(train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray) -> float:
    """Return the test accuracy of a logistic regression, in percent."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    return 100 * float(probe.fit(train, train_labels).score(test, test_labels))


def main() -> None:
    """Measure every truncation, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=800, help="documents that the regression is fitted on")
    parser.add_argument("--test", type=int, default=600, help="documents that it is tested on")
    parser.add_argument("--calibration", type=int, default=128, help="training documents that the encoder is shown")
    parser.add_argument("--tokens", type=int, default=48, help="of a document")
    args = parser.parse_args()
    from transformers import AutoModel  # noqa: PLC0415

    folder = Path(os.environ.get("SHARDING_DATA") or "data").expanduser()
    model = AutoModel.from_pretrained(folder / "minilm", dtype=torch.float32).eval()
    train, train_labels = load_documents(folder, "train", args.train, args.tokens)
    test, test_labels = load_documents(folder, "test", args.test, args.tokens)
    calibration = train[: args.calibration // BATCH]
    exact = features_of(model, test)
    models = {("all", "none", "weights"): model}
    for terms in (0.1, 0.25, 0.5):
        for by, batches in (("weights", None), ("activations", calibration)):
            models[terms, "none", by] = factorize(model, terms, ["pooler"], calibration=batches)
    for residual in ("int4", "int8"):
        models[16 / 384, residual, "weights"] = factorize(model, 16 / 384, ["pooler"], residual=residual)
    path = Path(__file__).parents[1] / "results" / "calibration" / "calibration.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["keep_ratio", "residual", "terms_by", "feature_error", "accuracy"])
        for (terms, residual, by), each in models.items():
            features = features_of(each, test)
            error = np.linalg.norm(features - exact) / np.linalg.norm(exact)
            percent = accuracy(features_of(each, train), train_labels, features, test_labels)
            row = [terms if terms == "all" else f"{terms:.3g}", residual, by, f"{error:.3f}", f"{percent:.1f}"]
            writer.writerow(row)
            file.flush()
            print(*row, sep="\t", flush=True)


if __name__ == "__main__":
    main()
