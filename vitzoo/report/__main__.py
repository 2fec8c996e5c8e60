"""`python -m vitzoo.report` is `vitzoo report`."""

from vitzoo.report import main

main()
