"""The secret seed of a run with differential privacy: it draws the clients of each round, and the noise.

It is kept in the run's directory, where only its owner can read it, so that a resumed run invites the same clients and
releases the same numbers. Whoever has it can take the noise away. So it is neither in the configuration nor sent to
trackers or clients, unless it was given as `privacy.secret_seed`.
"""

import logging

from sharding.errors import UserError
from sharding.privacy.gaussian import secret_seed
from train.config.schema import Config
from train.rundir.file_names import METRICS_FILE, SECRET_FILE
from train.utils.files import write_atomically

log = logging.getLogger(__name__)


def read_secret(config: Config) -> int:
    """Return the secret seed of a run with privacy: the configured one, or that of its directory, or a new one.

    Raises:
        UserError: the file of a run that has begun is missing or damaged.
    """
    assert config.privacy is not None
    if config.privacy.secret_seed is not None:
        return config.privacy.secret_seed
    path = config.directory / SECRET_FILE
    if not path.is_file() and not (config.directory / METRICS_FILE).exists():
        return secret_seed()
    try:
        return int(path.read_text(encoding="ascii"), 16)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the secret seed of this run in {path} ({type(error).__name__}), and with another one its "
            "account would be wrong; restore the file, or choose another output=…"
        ) from error


def write_secret(config: Config, seed: int) -> None:
    """Keep a secret seed for resumed runs; or if it was given, warn that it is known."""
    assert config.privacy is not None
    if config.privacy.secret_seed is not None:
        log.warning("privacy.secret_seed is set: whoever knows it can take the noise away; leave it out but for tests")
    elif not (path := config.directory / SECRET_FILE).exists():
        write_atomically(path, f"{seed:x}\n".encode(), mode=0o600)
