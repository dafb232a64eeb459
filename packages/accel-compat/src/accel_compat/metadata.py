"""The metadata of a distribution called `accelerate`, which its dependants read."""

from __future__ import annotations

from email.message import EmailMessage
from importlib.metadata import Distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_compat.alias import REFERENCE, REFERENCE_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

HOME_PAGE = "https://github.com/huggingface/accelerate"
"""What dependants, such as sentence-transformers, look for in the metadata to tell the distribution."""


def version_of_accel() -> str:
    """The version of accel, which is that of all its packages."""
    return version("accel-compat")


class AliasDistribution(Distribution):
    """The metadata of a distribution called `accelerate`."""

    @property
    def metadata(self) -> Any:
        """Name, version and home page, as dependants check them."""
        message = EmailMessage()
        for key, value in {
            "Metadata-Version": "2.1",
            "Name": REFERENCE,
            "Version": REFERENCE_VERSION,
            "Summary": "accel, under the name of the library whose interface it has",
            "Home-page": HOME_PAGE,
        }.items():
            message[key] = value
        return message

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA or `top_level.txt`; there are no other files."""
        if filename == "top_level.txt":  # from which `packages_distributions` learns whose module it is
            return f"{REFERENCE}\n"
        return str(self.metadata) if filename == "METADATA" else None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Locate a file of the distribution, which is accel's."""
        return Path(__file__).parents[1] / path

    @property
    def files(self) -> Iterable[Any] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """None: the distribution has no files of its own."""
        return None
