"""Reads the text files of tasks, and checks that a run learned from the same text."""

import codecs
import gzip
import hashlib
import zlib
from pathlib import Path

from attention_jax.runs.run_folder import read_config


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, plain or .gz.

    Raises:
        ValueError: the file cannot be read, or is not UTF-8.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {reason}") from error
    return decode_text(content, str(path))


def decode_text(content: bytes, name: str) -> str:
    """UTF-8 as text; otherwise raises ValueError with the name and the line."""
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} must be UTF-8; line {line} has the invalid byte 0x{content[error.start]:02x}"
        ) from error


def data_digest(content: bytes) -> str:
    """SHA-256 as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def check_data(folder: Path, name: str, digest: str) -> None:
    """Raises ValueError unless the run in a folder learned from data with this digest.

    Args:
        folder: of the run.
        name: of the digest in config.json, such as "text_sha256.training".
        digest: of the data now.
    """
    stored = read_config(folder)
    for part in name.split("."):
        stored = stored.get(part, {})
    if stored != digest:
        raise ValueError(
            f"workdir {folder} learned from other data: {name} has changed since; restore the files"
        )
