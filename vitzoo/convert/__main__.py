"""`python -m vitzoo.convert` is `vitzoo convert`."""

from vitzoo.convert import main

main()
