"""`python -m vitzoo.doctor` is `vitzoo doctor`."""

from vitzoo.doctor import main

main()
