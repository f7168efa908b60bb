"""Flower's SuperLink with a Control API that answers only calls with a token.

Whoever reaches the Control API can register nodes and submit runs, and a run is code. Flower 1.41 has the client's side
of a login, and a hook for the server's side that its open release leaves empty. `Place.environment` names the file in
which the operator's `flwr` keeps the token.
"""

import os
from collections.abc import Sequence
from hmac import compare_digest
from pathlib import Path
from secrets import token_urlsafe

from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
from flwr.common.constant import ACCESS_TOKEN_KEY, AuthnType
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore
from flwr.superlink import config_loader
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import flower_superlink

TOKEN = "FEDERATION_TOKEN"  # the environment variable that has it; the command line is public

Metadata = Sequence[tuple[str, str | bytes]]


class TokenPlugin(NoOpControlAuthnPlugin):
    """Admits callers of the Control API that have the token."""

    def __init__(self) -> None:
        self._token = os.environ.pop(TOKEN)  # Flower starts the apps with this environment

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        """Return whether the caller has the token, and the only account."""
        given = str(dict(metadata).get(ACCESS_TOKEN_KEY, ""))
        valid = compare_digest(given.encode(), self._token.encode())
        return super().validate_tokens_in_metadata(metadata) if valid else (False, None)

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:
        """Return no new token."""
        return None, None


def write_token(home: Path, address: str) -> str:
    """Make a token, and write it where `flwr` with this home looks for it when it calls this address."""
    token, store = token_urlsafe(32), FileCredentialStore(home / "credentials.yaml")
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    for key in (ACCESS_TOKEN_STORE_KEY, REFRESH_TOKEN_STORE_KEY):
        store.set(key % address, token.encode())
    return token


def main() -> None:
    """Run `flower-superlink` with its own options."""
    os.environ["FLWR_OIDC_ENABLED"] = "1"  # Flower then takes the plugin of this name
    config_loader.get_control_authn_ee_plugins = lambda: {AuthnType.OIDC: TokenPlugin}
    flower_superlink()


if __name__ == "__main__":
    main()
