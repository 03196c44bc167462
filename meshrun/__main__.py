"""`python -m meshrun`: what launchers start, and the same as the command `meshrun`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; whoever presses CTRL-C while Python still imports gets a sentence too."""
    try:
        from meshrun.cli.main import main as command

        command()
    except KeyboardInterrupt:
        print("meshrun: stopped by CTRL-C", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
