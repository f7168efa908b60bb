"""What a run with differential privacy keeps to itself: its secret seed, and the account of what it has released.

The seed draws the clients of each round, and the noise. It is kept in the run's directory, where only its owner can
read it, so that a resumed run invites the same clients and releases the same numbers. Whoever has it can take the noise
away. So it is neither in the configuration nor sent to trackers or clients, unless it was given as
`privacy.secret_seed`. Each release adds a line to the file, so that the account cannot be lost without the seed, and a
run without the seed cannot go on.
"""

import logging
import os

from sharding.errors import UserError
from train.config.schema import Config
from train.experiment.budget import Account, Release
from train.experiment.experiment import Experiment
from train.rundir.file_names import CONFIG_FILE, METRICS_FILE, SECRET_FILE
from train.utils.errors import writing
from train.utils.files import write_atomically
from train.utils.jsonl import read_lines, split

UNKNOWN = "unknown"  # the release of a round that the file lacks: run again, it counts as another one

log = logging.getLogger(__name__)


def open_account(config: Config, experiment: Experiment, resume: bool) -> Account | None:
    """Return the account of a run with privacy. One that has begun gets the secret seed of its directory.

    Raise a UserError if a run has begun there, and the file is missing or damaged.
    """
    if config.privacy is None:
        return None
    path, releases = config.directory / SECRET_FILE, list[Release]()
    if resume and (path.exists() or (config.directory / CONFIG_FILE).exists()):  # the seed is written first
        try:
            seed, *lines = split(path.read_bytes())
            experiment.use_secret(int(seed, 16))
            releases = [(int(round), name.decode()) for round, name in map(bytes.split, lines)]
            rounds = len(read_lines(config.directory / METRICS_FILE))
            releases += [(round, UNKNOWN) for round in {*range(rounds)} - {round for round, _ in releases}]
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot read the secret seed of this run in {path} ({type(error).__name__}), and with another one its "
                "account would be wrong; restore the file, or choose another output=…"
            ) from error

    def keep(release: Release) -> None:
        with writing(path), path.open("ab") as file:
            file.write(_line(release))
            file.flush()
            os.fsync(file.fileno())

    return Account(config, releases, keep)


def write_secret(config: Config, experiment: Experiment, account: Account | None) -> None:
    """Keep the secret seed and the releases for resumed runs; if the seed was given, warn that it is known."""
    if config.privacy is None or account is None:
        return
    if config.privacy.secret_seed is not None:
        log.warning("privacy.secret_seed is set: whoever knows it can take the noise away; leave it out but for tests")
    assert experiment.server.privacy is not None
    seed = f"{experiment.server.privacy.seed:x}\n".encode()
    lines = map(_line, account.releases)
    write_atomically(config.directory / SECRET_FILE, b"".join([seed, *lines]), mode=0o600)


def _line(release: Release) -> bytes:
    round, name = release
    return f"{round} {name}\n".encode()
