"""`python -m vitzoo.study` is `vitzoo study`."""

from vitzoo.study import main

main()
