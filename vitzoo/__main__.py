"""`python -m vitzoo <command>`, the same as `vitzoo <command>`."""

from vitzoo.cli import main

main()
