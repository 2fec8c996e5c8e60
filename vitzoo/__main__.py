"""`python -m vitzoo <command>` is `vitzoo <command>`."""

from vitzoo.cli import main

main()
