"""The secret seed of a run with differential privacy: it draws the clients of each round, and the noise.

It is kept in the run's directory, where only its owner can read it, so that a resumed run invites the same clients and
releases the same numbers. Whoever has it can take the noise away. So it is neither in the configuration nor sent to
trackers or clients, unless it was given as `privacy.secret_seed`.
"""

import logging

from sharding.errors import UserError
from train.config.schema import Config
from train.experiment.experiment import Experiment
from train.rundir.file_names import METRICS_FILE, SECRET_FILE
from train.utils.files import write_atomically

log = logging.getLogger(__name__)


def recall_secret(config: Config, experiment: Experiment) -> None:
    """Give a run that has begun the secret seed of its directory, unless one is configured.

    Raises:
        UserError: the file is missing or damaged.
    """
    if config.privacy is None or config.privacy.secret_seed is not None:
        return
    path = config.directory / SECRET_FILE
    if not path.exists() and not (config.directory / METRICS_FILE).exists():
        return
    try:
        experiment.use_secret(int(path.read_text(encoding="ascii"), 16))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the secret seed of this run in {path} ({type(error).__name__}), and with another one its "
            "account would be wrong; restore the file, or choose another output=…"
        ) from error


def write_secret(config: Config, experiment: Experiment) -> None:
    """Keep the secret seed for resumed runs; or if it was given, warn that it is known."""
    if config.privacy is None:
        return
    if config.privacy.secret_seed is not None:
        log.warning("privacy.secret_seed is set: whoever knows it can take the noise away; leave it out but for tests")
        return
    assert experiment.server.privacy is not None
    write_atomically(config.directory / SECRET_FILE, f"{experiment.server.privacy.seed:x}\n".encode(), mode=0o600)
