"""The files of a run's directory, by name."""

CONFIG_FILE = "config.yaml"  # the complete configuration
METRICS_FILE = "metrics.jsonl"  # one line per round
CHECKPOINT_FILE = "checkpoint.safetensors"  # the newest checkpoint
PREVIOUS_FILE = "checkpoint.previous.safetensors"  # the one before it
MODEL_FILE = "model.safetensors"  # the evaluated model of the last round, written when the run ends
BEST_FILE = "model.best.safetensors"  # the evaluated model of the round with the best accuracy
PROVENANCE_FILE = "provenance.json"  # versions, commit, device and the like
CLIENTS_FILE = "clients.json"  # the clients' data and keep ratios
LAYERS_FILE = "layers.jsonl"  # λ, π and ω of every layer, in some rounds
PILOTS_FILE = "pilots.json"  # the pilots' estimates
WANDB_FILE = "wandb.json"  # the run's id at Weights & Biases
SECRET_FILE = "secret_seed"  # with privacy, of the noise and of the clients' draws, and the account of releases
SECRET_CLIENTS_FILE = "secret_clients.json"  # with privacy, in the place of CLIENTS_FILE
RUN_FILES = (
    *(CONFIG_FILE, METRICS_FILE, CHECKPOINT_FILE, PREVIOUS_FILE, MODEL_FILE, BEST_FILE),
    *(PROVENANCE_FILE, CLIENTS_FILE, LAYERS_FILE, PILOTS_FILE, WANDB_FILE, SECRET_FILE, SECRET_CLIENTS_FILE),
)
ARTIFACTS = (CONFIG_FILE, PROVENANCE_FILE, METRICS_FILE, LAYERS_FILE, CLIENTS_FILE, MODEL_FILE)  # uploaded to W&B
REPORT_FILES = (
    *("summary.md", "summary.csv", "accuracy_vs_bytes.png", "accuracy_vs_bytes.svg"),
    *("grid.png", "grid.svg"),
)
REPORT_SIGN = "<!-- spectral-sharding report: "  # begins every summary, before the commands that made it, as JSON
LOCK_FILE = ".lock"  # held by the process that writes
