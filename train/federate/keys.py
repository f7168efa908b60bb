"""The certificates of a federation's server, and its nodes' keys."""

from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_certificates(folder: Path, *names: str) -> None:
    """Write `ca.crt`, and `server.crt` with `server.key` for a server of these names and addresses."""
    authority = trustme.CA(organization_name="spectral-sharding")
    server = authority.issue_cert(*names)
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    server.cert_chain_pems[0].write_to_path(str(folder / "server.crt"))
    _write_private(folder / "server.key", server.private_key_pem.bytes())


def write_node_key(folder: Path) -> None:
    """Write `node.key` and `node.pub` in OpenSSH's format."""
    key, form = ec.generate_private_key(ec.SECP384R1()), serialization.PrivateFormat.OpenSSH
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_private(folder / "node.key", private)
    (folder / "node.pub").write_bytes(public)


def _write_private(path: Path, key: bytes) -> None:
    path.touch(mode=0o600)  # readable only by its owner
    path.write_bytes(key)
