"""`python validate.py …` is `vitzoo validate …`; `accelerate launch validate.py …` runs it in several processes."""

from vitzoo.validate import main

if __name__ == '__main__':
    main()
