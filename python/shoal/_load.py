"""Import of the extension, with an error that says what does not fit."""

import torch  # before the extension, which needs its libraries

from . import _version

__version__ = _version.version


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


if _minor(torch.__version__) != _minor(_version.torch):
    raise ImportError(
        f"shoal {_version.version} was built for torch {_version.torch}, but torch {torch.__version__} is installed: "
        f"install torch {_version.torch}, or the wheel of shoal that was built for torch {torch.__version__}"
    )
