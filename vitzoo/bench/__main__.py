"""`python -m vitzoo.bench <table>` is `vitzoo bench <table>`."""

from vitzoo.bench import main

main()
