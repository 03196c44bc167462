"""`python -m meshrun`: what launchers start, and the same as the command `meshrun`."""

from meshrun.cli.main import main

main()
