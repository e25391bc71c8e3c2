"""`python -m sdkit_dispatch` is the command line."""

from .cli import main

main()
