"""`python -m vitzoo.transfer` is `vitzoo transfer`."""

from vitzoo.transfer import main

main()
