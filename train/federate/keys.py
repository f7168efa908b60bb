"""Certificates and keys for a federation on one machine; a real one brings its own.

The server shows a certificate that our own authority signed, nodes sign what they send with a key of their own, whose
public half the server knows. Private halves are readable by their owner alone.
"""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

VALID = timedelta(days=30)
LOOPBACK = "127.0.0.1"


def write_certificates(folder: Path) -> None:
    """Write `ca.crt`, and `server.crt` with `server.key` for the loopback address."""
    authority, server = _new_key(), _new_key()
    root = _certificate(
        "spectral-sharding test authority", authority, "spectral-sharding test authority", authority, ca=True
    )
    leaf = _certificate("localhost", server, "spectral-sharding test authority", authority, ca=False)
    (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "server.key", server, serialization.PrivateFormat.TraditionalOpenSSL)


def write_node_key(folder: Path) -> None:
    """Write `node.key` and `node.pub` in OpenSSH's format."""
    key = _new_key()
    _write_private(folder / "node.key", key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "node.pub").write_bytes(public)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, authority: ec.EllipticCurvePrivateKey, ca: bool
) -> x509.Certificate:
    now = datetime.now(UTC)
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ip_address(LOOPBACK))]
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    usage = x509.KeyUsage(
        digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(signer, critical=False)
    )
    if not ca:
        builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
    return builder.sign(authority, hashes.SHA384())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])
