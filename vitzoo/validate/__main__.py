"""`python -m vitzoo.validate` is `vitzoo validate`."""

from vitzoo.validate import main

main()
