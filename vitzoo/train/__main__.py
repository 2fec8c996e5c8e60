"""`python -m vitzoo.train` is `vitzoo train`."""

from vitzoo.train import main

main()
