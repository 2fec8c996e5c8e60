"""`python -m vitzoo.push` is `vitzoo push`."""

from vitzoo.push import main

main()
