"""Import of the extension, with an error that says what does not fit."""

import sys

import torch  # before the extension, which needs its libraries

try:
    from . import _version
except ImportError:
    raise ImportError(
        "this folder of shoal has Python files alone: install the wheel, or build the target shoal_python"
    ) from None

__version__ = _version.version


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


if _minor(torch.__version__) != _minor(_version.torch):
    raise ImportError(
        f"shoal {_version.version} was built for torch {_version.torch}, but torch {torch.__version__} is installed: "
        f"install torch {_version.torch}, or the wheel of shoal that was built for torch {torch.__version__}"
    )
try:
    from . import _C  # noqa: F401
except ImportError as error:
    _python = ".".join(str(number) for number in sys.version_info[:2])
    raise ImportError(
        f"the extension of shoal {_version.version}, which was built for torch {_version.torch}, does not load in Python {_python} "
        f"with torch {torch.__version__}: install the wheel of shoal that was built for both of these ({error})"
    ) from error
