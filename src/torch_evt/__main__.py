"""`python -m torch_evt` is the command `evt`."""

from torch_evt.cli import main

main()
