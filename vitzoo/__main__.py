from vitzoo.cli import main

main()
