"""`python -m vitzoo.export` is `vitzoo export`."""

from vitzoo.export import main

main()
