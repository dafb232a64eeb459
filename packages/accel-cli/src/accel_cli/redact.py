"""What must not leave this machine with a report: tokens, keys and passwords."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"
"""What stands in the place of a secret."""

# A word of a name, between underscores, dots or dashes.
_NAMES = frozenset(
    {
        "token", "tokens", "secret", "secrets", "password", "passwd", "key", "keys", "apikey", "credential",
        "credentials", "auth", "cookie",
    }
)  # fmt: skip
_VALUES = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{16,}                           # Hugging Face
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                   # AWS
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w+ # GitHub
    | \bsk-[A-Za-z0-9_-]{16,}                         # several model providers
    | \beyJ[\w-]+\.[\w-]+\.[\w-]+                     # a JSON web token
    """,
    re.VERBOSE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_ASSIGNED = re.compile(
    r"(\b\w*(?:TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_KEY)\w*\s*[=:]\s*)([^\s,;]+)", re.IGNORECASE
)


def redact(name: str, value: Any) -> Any:
    """Give a value as it may be shown: what its name or its form tells to be secret is replaced.

    Example:
        >>> redact("WANDB_API_KEY", "0123"), redact("TOKENIZERS_PARALLELISM", "false")
        ('<redacted>', 'false')
        >>> redact("proxy", "http://ada:pass@proxy:80")
        'http://<redacted>@proxy:80'
    """
    if isinstance(value, dict):
        return {key: redact(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(name, item) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if _NAMES & set(re.split(r"[^a-z0-9]+", name.lower())):
        return REDACTED
    text = _IN_URL.sub(REDACTED, _VALUES.sub(REDACTED, value))
    return _ASSIGNED.sub(rf"\g<1>{REDACTED}", text)
